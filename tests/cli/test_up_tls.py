"""`headrace up` with a certificate: every command finds and trusts the door."""

import urllib.request
from pathlib import Path

from pipeline import tls
from tests.certificates import self_made
from tests.cli.test_up import CONFIG, Up, headrace


def test_the_stack_serves_https_and_its_commands_trust_it(tmp_path: Path) -> None:
    cert, key = self_made(tmp_path)
    path = tmp_path / "headrace.toml"
    door = f'gateway = {{ port = 0, tls_cert = "{cert}", tls_key = "{key}" }}'
    path.write_text(CONFIG.format(state_dir=tmp_path / "state").replace("gateway = { port = 0 }", door), "utf-8")
    up = Up(path, "--ask", "Hello?")
    try:
        up.until("first token")
        url = up.endpoints["gateway"]
        assert f"Ready at {url}" in up.text
        assert url.startswith("https://127.0.0.1:")
        assert f"curl -N --cacert {cert} https://" in up.text
        with urllib.request.urlopen(f"{url}/ready", context=tls.trusting(cert), timeout=5) as answer:
            assert answer.status == 200
        chat = headrace(path, "chat", "Tell me more.")
        assert chat.returncode == 0, chat.stderr
        bench = headrace(path, "bench", "--requests", "4", "--json")
        assert bench.returncode == 0, bench.stderr
        assert '"not_trusted":1' in headrace(path, "bench", "--requests", "1", "--url", url, "--json").stdout
        elsewhere = headrace(path, "chat", "Tell me more.", "--url", url)
        assert elsewhere.returncode == 1
        assert "is not trusted" in elsewhere.stderr
        assert headrace(path, "chat", "Tell me more.", "--url", url, "--ca", str(cert)).returncode == 0
    finally:
        assert up.end() == 0
