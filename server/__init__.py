"""The server for OpenAI clients, and its page. Without it there is no scripts/serve.py."""

NEEDS = ("files", "run", "drafts")
ADDS = {"server": {"program": "server.start:main", "app": "server.app"}}
