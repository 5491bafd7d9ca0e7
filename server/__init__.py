"""The server for OpenAI clients, and its page. Without it there is no scripts/serve.py."""

NEEDS = ("files", "run", "drafts")
ADDS = {"server": {"program": "server.options:main", "app": "server.app"}}
