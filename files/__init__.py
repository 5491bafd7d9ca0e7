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
        "chat": "files.chat",
        "texts": "files.texts:read_text_files",
        "weights": "files.checkpoint:WeightFiles",
        # for checkpoints of one kind, or where an option asks for it
        "codes": "files.gptq_awq:QuantizedFiles",
        "format of codes": "files.quant_config:read_stored_format",
        "eagle3": "files.eagle_variants",
        "gguf": "files.gguf:GgufFile",
        "gguf head": "files.gguf_heads:GgufHead",
        "gguf header": "files.gguf_header:read_header",
        "gguf template": "files.gguf_header:chat_template_text",
        "gguf tokenizer": "files.gguf_tokenizer",
        "head beside": "files.known_heads:head_beside",
        "hub": "files.hub:hub_model",
        "jinja": "files.jinja",
        "mtp": "files.mtp",
        "ollama": "files.ollama:ollama_model",
        "packaged": "files.packaged:fetch_default",
        "published head": "files.known_heads:published_head",
        "published tau": "files.published:published_tau",
        "rounding": "files.rounding",
    },
    "folder": {"lock": "files.lock:folder_lock"},
    "rope": {"yarn": "files.ropes:yarn", "proportional": "files.ropes:proportional"},
}
