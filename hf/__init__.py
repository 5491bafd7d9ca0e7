"""Read Hugging Face directories and GGUF files: config.json, weights, tokenizer, chat template."""
