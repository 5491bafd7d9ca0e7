"""The options of serve.py. No torch is imported, so that --help and mistakes come at once."""

from __future__ import annotations

from dataclasses import dataclass

from run.options import GenerateConfig
from run.parsing import option

ABOUT = "Serve a model to OpenAI clients."


@dataclass(frozen=True)
class ServeConfig(GenerateConfig):
    """Options of a server. Those of generate.py that belong to a single run are left out."""

    host: str = option("127.0.0.1", "address to listen at")
    port: int = option(8000, "port to listen at; 0: a free one", least=0, most=65535)
    batch_size: int = option(4, "requests decoded side by side", least=1)
    max_new_tokens: int = option(
        512,
        "tokens of an answer at most, where a request names no other number",
        least=1,
        short="n",
    )
    temperature: float = option(
        0.0,
        "of requests that name none, as are the next three; default: as the model's "
        "generation_config says, 0 where it says nothing",
        least=0,
    )
    max_waiting: int = option(
        64, "answers that may wait for their turn; more requests are refused", least=0
    )
    api_key: str = option("", "key that requests to /v1 must bring, as OpenAI clients send it")
    cors: str = option(
        "", "origins whose pages may ask, comma-separated, as http://localhost:3000; *: all"
    )
    allowed_hosts: str = option(
        "",
        "further names that the server answers to, comma-separated, as behind a proxy; *: any. A "
        "request with the --api_key may use any, and so may all with another --host",
    )
    max_body: int = option(1_000_000, "bytes of a request at most", least=1)
    prompt: str | None = option(None, "", flag=False)
    prompt_file: str = option("", "", flag=False)
    prompt_ids: str | None = option(None, "", flag=False)
    interactive: bool = option(False, "", flag=False)
    num_samples: int = option(1, "", flag=False)
    seed: int = option(0, "", flag=False, least=0, most=2**64 - 1)
    compare: bool = option(False, "", flag=False)
    json: str = option("", "", flag=False)
    trace: str = option("", "", flag=False)
    profile: str = option("", "", flag=False)
