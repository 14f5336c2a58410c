"""The `openai` SDK as a client, directly and through a LiteLLM proxy."""

import os
import secrets
import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Final

import msgspec
import openai

from tests.clients.client import Check, Client, ClientFailed, Job
from tests.clients.compare import Said
from tests.e2e.running import ROOT
from tests.ports import free_port

PROXY_START_S: Final = 120.0
"""It imports for a quarter of a minute, and the cores may be busy."""

PROXY_END_S: Final = 10.0

LEFT_S: Final = 5.0
"""For Headrace to hear, through the proxy, that a client has left. The reply would go on for longer."""

LONG_TOKENS: Final = 3000
"""Twelve seconds of decode."""

PROXY_CONFIG: Final = """
model_list:
  - model_name: {model}
    litellm_params: {{model: openai/{model}, api_base: "{gateway}/v1", api_key: none}}
"""


class OpenAISdk(Client):
    """The SDK of our own environment."""

    name = "openai-sdk"
    about = "the openai SDK, streaming"
    distribution = "openai"
    tokenizes = False

    def url(self, job: Job) -> str:
        """Whom it asks."""
        return job.gateway

    def command(self, job: Job) -> Sequence[str]:
        """A process of its own."""
        load = job.load
        return (
            sys.executable, "-m", "tests.clients.sdk_load", "--url", self.url(job), "--model", job.model,
            "--requests", str(load.requests), "--concurrency", str(load.concurrency),
            "--prompt-tokens", str(load.prompt_tokens), "--reply-tokens", str(load.reply_tokens),
            "--report", str(job.folder / "sdk.json"),
        )  # fmt: skip

    def environment(self, job: Job) -> Mapping[str, str]:
        """The SDK insists on a key."""
        return {"OPENAI_API_KEY": "none"}

    def read(self, job: Job) -> Said:
        """Its report has our own form."""
        return msgspec.json.decode((job.folder / "sdk.json").read_bytes(), type=Said)


class LiteLLM(OpenAISdk):
    """The SDK asks a LiteLLM proxy, and the proxy Headrace. The proxy's own time is in what the SDK measures."""

    name = "litellm"
    about = "the openai SDK through a LiteLLM proxy"
    packages = ("litellm[proxy]==1.108.7",)
    distribution = "litellm"
    judged_times = False

    def __init__(self) -> None:
        self._port = free_port()
        self._key = f"sk-{secrets.token_urlsafe(32)}"

    def url(self, job: Job) -> str:
        """The proxy."""
        return f"http://127.0.0.1:{self._port}"

    def environment(self, job: Job) -> Mapping[str, str]:
        """The proxy's key, and for the proxy itself: nothing is fetched, nothing is told to others."""
        return {
            "OPENAI_API_KEY": self._key,
            "LITELLM_MASTER_KEY": self._key,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_TELEMETRY": "False",
        }

    def told(self, job: Job) -> str:
        """Both commands."""
        proxy = shlex.join(job.shown(argument) for argument in self._proxy_command(job))
        return f"{proxy} & {super().told(job)}".replace(self.url(job), "$PROXY")

    @contextmanager
    def ready(self, job: Job) -> Iterator[None]:
        """The proxy."""
        (job.folder / "litellm.yaml").write_text(PROXY_CONFIG.format(model=job.model, gateway=job.gateway), "utf-8")
        with (job.folder / "proxy.txt").open("w") as out:
            proxy = subprocess.Popen(
                self._proxy_command(job), cwd=ROOT, env=os.environ | self.environment(job),
                stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            )  # fmt: skip
        try:
            self._await_alive(job, proxy)
            yield
        finally:
            proxy.terminate()
            with suppress(subprocess.TimeoutExpired):
                proxy.wait(PROXY_END_S)
            proxy.kill()
            proxy.wait()

    def checks(self, job: Job, count: Callable[[str], float]) -> list[Check]:
        """Errors keep their kind, and leaving is heard."""
        with openai.OpenAI(base_url=f"{self.url(job)}/v1", api_key=self._key, max_retries=0) as sdk:
            return [self._error_kept(sdk, job), self._leaving_heard(sdk, job, count)]

    def _error_kept(self, sdk: openai.OpenAI, job: Job) -> Check:
        what = "a prompt too long is a 400 that says so"
        try:
            sdk.chat.completions.create(model=job.model, messages=[{"role": "user", "content": "word " * 9000}])
        except openai.APIStatusError as error:
            kept = isinstance(error, openai.BadRequestError) and "The prompt has" in error.message
            return Check(what=what, seen=f"{error.status_code} {type(error).__name__}", ok=kept)
        return Check(what=what, seen="a reply", ok=False)

    def _leaving_heard(self, sdk: openai.OpenAI, job: Job, count: Callable[[str], float]) -> Check:
        before = count("cancelled")
        stream = sdk.chat.completions.create(
            model=job.model, messages=[{"role": "user", "content": "Go on."}], stream=True,
            max_tokens=LONG_TOKENS, extra_body={"ignore_eos": True},
        )  # fmt: skip
        next(iter(stream))
        stream.close()
        left_s = time.monotonic()
        while (heard := count("cancelled") - before) < 1 and time.monotonic() < left_s + LEFT_S:
            time.sleep(0.05)  # between two looks; nothing tells us
        seen = f"heard within {time.monotonic() - left_s:.1f} s" if heard else f"not heard within {LEFT_S:g} s"
        return Check(what="a stream that is closed at the proxy ends the work", seen=seen, ok=heard == 1)

    def _proxy_command(self, job: Job) -> Sequence[str]:
        config = str(job.folder / "litellm.yaml")
        return (str(job.programs / "litellm"), "--config", config, "--host", "127.0.0.1", "--port", str(self._port))

    def _await_alive(self, job: Job, proxy: subprocess.Popen[bytes]) -> None:
        until_s = time.monotonic() + PROXY_START_S
        while time.monotonic() < until_s and proxy.poll() is None:
            with suppress(OSError), urllib.request.urlopen(f"{self.url(job)}/health/liveliness", timeout=5):
                return
            time.sleep(0.2)  # between two looks; nothing tells us
        raise ClientFailed(
            f"the proxy does not answer:\n{(job.folder / 'proxy.txt').read_text('utf-8', 'replace')[-2000:]}"
        )
