"""Formats of weights, heads, tokenizers and templates, and hubs. Without it the flat command reads

Hugging Face directories in safetensors and heads in the official layouts.
"""

NEEDS = ()
ADDS = {
    "reader": {
        "loader": "files.weights:CheckpointLoader",
        "head": "files.heads:load_head",
        "model": "files.weights:load_model",
        "tokenizer": "files.tokenizer:read_tokenizer",
    },
    "folder": {"lock": "files.io:folder_lock"},
    "rope": {"yarn": "files.ropes:yarn", "proportional": "files.ropes:proportional"},
}
