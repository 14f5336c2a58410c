"""A report for people, and the line that tells of a run under way."""

from pipeline.bench.histogram import Times
from pipeline.bench.session import Status
from pipeline.bench.tally import Report
from pipeline.cli.tables import table

HEAD = ("MS", "MEAN", "P50", "P90", "P99", "P99.9", "MAX")

LATE_MS = 10.0
"""A generator that is later than this, one time in a hundred, measures itself."""


def page(report: Report) -> str:
    """The whole of it."""
    cached = report.cached_tokens / report.prompt_tokens if report.prompt_tokens else 0.0
    rows = {
        "first token": report.ttft,
        "between tokens": report.itl,
        "per token": report.tpot,
        "whole reply": report.e2e,
        "refusal": report.refusal,
    }
    lines = [
        f"requests  {report.requests}, {_counts(report)}; {report.per_s:.1f}/s for {report.duration_s:.1f} s ({report.loop})",
        f"tokens    {report.prompt_tokens:,} prompt ({cached:.0%} cached: {report.hbm_tokens:,} in the engine's cache, "
        f"{report.lmcache_tokens:,} in LMCache), {report.output_tokens:,} reply, {report.output_tokens_per_s:,.0f}/s",
        "",
        table(HEAD, [(name, *_cells(times)) for name, times in rows.items() if times.count]),
        "",
        *_goodput(report),
        *(f"{count:>6} × {message}" for message, count in report.error_messages.items()),
        *_late(report),
        f"This generator took {report.cpu_ms_per_request:.2f} ms of CPU a request.",
    ]
    return "\n".join(lines)


def _counts(report: Report) -> str:
    parts = [f"{report.completed} whole", f"{report.errors} failed"]
    if report.refused:
        parts.insert(1, f"{report.refused} refused for now")
    if report.left:
        parts.append(f"{report.left} left running")
    return ", ".join(parts)


def _cells(times: Times) -> list[str]:
    figures = (times.mean_ms, times.p50_ms, times.p90_ms, times.p99_ms, times.p999_ms, times.max_ms)
    return ["" if figure is None else f"{figure:.1f}" for figure in figures]


def _goodput(report: Report) -> list[str]:
    good = report.goodput
    if good is None:
        return []
    slo = [
        f"{name} within {bound_ms:g} ms"
        for name, bound_ms in (("first token", good.slo_ttft_ms), ("99 % of gaps", good.slo_itl_ms))
        if bound_ms is not None
    ]
    return [f"goodput   {good.per_s:.1f}/s, {good.ratio:.1%} of requests: {', '.join(slo)}"]


def _late(report: Report) -> list[str]:
    late_ms = report.send_lag.p99_ms or 0.0
    if late_ms <= LATE_MS:
        return []
    return [f"Sent late, p99 {late_ms:.0f} ms: too much in flight, or for this machine. Latencies include it."]


def progress(status: Status, requests: int | None) -> str:
    """One line. `requests`: how many there will be."""
    tally = status.tally
    of = f" of {requests}" if requests is not None else ""
    parts = [
        f"{status.elapsed_s:.0f} s",
        f"{tally.measured}{of} measured" if tally.measured or not tally.ended else f"warming up: {tally.ended}",
        f"{tally.running} running",
    ]
    if tally.completed:
        p50_ms, p99_ms = tally.ttft.percentile_ms(50), tally.ttft.percentile_ms(99)
        parts.append(f"first token p50 {p50_ms or 0:.0f} p99 {p99_ms or 0:.0f} ms")
    if tally.refused or tally.errors:
        parts.append(f"{tally.refused} refused, {tally.errors} failed")
    if status.stopping and not status.over:
        parts.append("stopping; Ctrl-C again leaves them")
    return " · ".join(parts)
