"""Reads what a Hugging Face directory or a GGUF file holds: config.json, weights, tokenizer, chat template."""
