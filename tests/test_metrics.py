"""The metrics: declared once, named alike, bounded, and readable by Prometheus."""

import re
import urllib.error
import urllib.request
from collections import Counter as Tally
from collections.abc import Iterable

import pytest
from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.parser import text_string_to_metric_families

from pipeline.telemetry import metrics

DECLARED = {name: value for name, value in vars(metrics).items() if isinstance(value, MetricWrapperBase)}


def _name(metric: MetricWrapperBase) -> str:
    (family,) = metric.describe()
    return str(family.name)


def _help(metric: MetricWrapperBase) -> str:
    (family,) = metric.describe()
    return str(family.documentation)


def _labels(metric: MetricWrapperBase) -> tuple[str, ...]:
    return tuple(metric._labelnames)


def each(metrics: Iterable[str] = DECLARED) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("constant", sorted(metrics))


def test_every_metric_is_declared_once_and_lies_in_our_registry() -> None:
    registered = Tally(family.name for family in metrics.REGISTRY.collect())
    assert registered == Tally(_name(metric) for metric in DECLARED.values())
    assert set(registered.values()) == {1}


@each()
def test_a_metric_is_named_after_its_constant(constant: str) -> None:
    assert _name(DECLARED[constant]) == f"headrace_{constant.lower()}"
    assert re.fullmatch(r"headrace(_[a-z0-9]+)+", _name(DECLARED[constant]))


@each()
def test_a_metric_says_in_a_sentence_what_it_counts(constant: str) -> None:
    said = _help(DECLARED[constant])
    assert said[0].isupper()
    assert said.endswith(".")


@each()
def test_a_unit_comes_last_in_a_name_and_only_where_it_is_one(constant: str) -> None:
    metric, name = DECLARED[constant], _name(DECLARED[constant])
    if isinstance(metric, Histogram):
        assert name.endswith("_seconds")
    elif isinstance(metric, Gauge):
        assert not name.endswith("_total")
    else:
        assert isinstance(metric, Counter)
        assert not name.endswith(("_seconds", "_ratio", "_total"))  # `_total` is appended on the wire
    assert not re.search(r"_(ms|us|millis|percent|count)$", name)


@each(name for name, metric in DECLARED.items() if isinstance(metric, Histogram))
def test_a_histogram_tells_times_from_a_millisecond_to_a_minute_apart(constant: str) -> None:
    histogram = DECLARED[constant]
    assert isinstance(histogram, Histogram)
    bounds = list(histogram._upper_bounds)
    assert bounds == sorted(set(bounds))
    assert (bounds[0], bounds[-2], bounds[-1]) == (0.001, 60, float("inf"))


@each()
def test_labels_are_few_and_their_values_are_known(constant: str) -> None:
    metric = DECLARED[constant]
    vocabulary = metrics.LABELS.get(_name(metric), {})
    assert set(_labels(metric)) == set(vocabulary)
    assert all(1 < len(values) <= 20 and len(set(values)) == len(values) for values in vocabulary.values())


def test_the_vocabulary_names_no_metric_that_does_not_exist() -> None:
    assert set(metrics.LABELS) <= {_name(metric) for metric in DECLARED.values()}


def test_what_is_rendered_can_be_parsed_and_holds_what_was_counted() -> None:
    metrics.PREFILLS.labels(outcome="handed_off").inc()
    metrics.TTFT_SECONDS.labels(outcome="whole", klass="interactive").observe(0.12)
    body, content_type = metrics.render()
    assert content_type.startswith("text/plain")
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}
    counted = {
        sample.labels["outcome"]: sample.value
        for sample in families["headrace_prefills"].samples
        if sample.name.endswith("_total")
    }
    assert counted["handed_off"] >= 1
    assert families["headrace_ttft_seconds"].type == "histogram"
    assert {_name(metric) for metric in DECLARED.values()} <= set(families)


def test_a_worker_serves_its_metrics_on_a_port_it_was_free_to_choose() -> None:
    endpoint = metrics.serve(0)
    try:
        assert endpoint.port > 0
        with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=5) as answer:
            assert answer.status == 200
            text = answer.read()
            assert b"headrace_requests" in text
            assert b"python_info" in text, "what vLLM counts lies in the same registry as this"
    finally:
        endpoint.close()


def test_ready_is_what_serving_says() -> None:
    endpoint = metrics.serve(0)
    url = f"http://127.0.0.1:{endpoint.port}/ready"
    try:
        metrics.SERVING.set(1)
        with urllib.request.urlopen(url, timeout=5) as answer:
            assert (answer.status, answer.read()) == (200, b'{"ready":true}')
        metrics.SERVING.set(0)
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(url, timeout=5).close()
    finally:
        endpoint.close()


def test_a_port_that_is_taken_is_an_error_and_a_closed_one_is_free_again() -> None:
    first = metrics.serve(0)
    port = first.port
    try:
        with pytest.raises(OSError, match="in use"):
            metrics.serve(port)
    finally:
        first.close()
    metrics.serve(port).close()
