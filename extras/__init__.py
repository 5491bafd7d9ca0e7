"""Options of vanilla and EAGLE decoding. Deleting this folder leaves both."""
