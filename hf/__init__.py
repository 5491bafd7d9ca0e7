"""Reads what a Hugging Face directory holds: config.json, weights, tokenizer, chat template."""
