"""What vanilla and EAGLE decoding do without: deleting this folder leaves both."""
