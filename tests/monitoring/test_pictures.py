"""The server that pages for pictures come from, and what makes a picture fail; Chromium is not needed."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from grafana.render import browser, picture


def get(url: str) -> tuple[int, str, bytes]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read()
    except urllib.error.HTTPError as error:
        return error.code, "", b""


def post(url: str, what: object) -> None:
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(what).encode(), method="POST"), timeout=10).close()


def test_pages_and_public_files_are_served_and_nothing_else(tmp_path: Path) -> None:
    public = tmp_path / "public"
    (public / "img").mkdir(parents=True)
    (public / "img" / "a.svg").write_text("<svg/>")
    (tmp_path / "secret").write_text("no")
    with browser.served({"/": b"page", "/page.js": b"script"}, public) as (address, reported):
        assert get(address) == (200, "text/html; charset=utf-8", b"page")
        assert get(f"{address}page.js") == (200, "text/javascript", b"script")
        assert get(f"{address}public/img/a.svg?x=1")[::2] == (200, b"<svg/>")
        for path in ("public/../secret", "public/%2e%2e/secret", "public//etc/hostname", "secret", "public/img"):
            assert get(address + path)[0] == 404, path
        post(f"{address}error", "it broke")
        post(f"{address}drawn", {"charts": 2})
    assert reported.errors == ["it broke"]
    assert reported.drawn == {"charts": 2}


CONTENT: dict[str, Any] = {
    "dashboard": {
        "panels": [
            {"title": "Budget", "type": "stat", "gridPos": {"x": 0, "y": 0, "w": 4, "h": 5}},
            {"title": "Step time", "type": "timeseries", "gridPos": {"x": 4, "y": 0, "w": 8, "h": 8}},
        ]
    }
}


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ([("drawn", {"text": "Budget\n1\nStep time", "charts": 1})], None),
        ([("drawn", {"text": "Budget\n1", "charts": 1})], "Step time"),
        ([("drawn", {"text": "Budget\n1\nStep time", "charts": 0})], "0 charts of 1"),
        ([("drawn", {"text": "Budget\nNo data\nStep time", "charts": 1})], "without"),
        ([("error", "no component"), ("drawn", {"text": "Budget Step time", "charts": 1})], "no component"),
        ([], "nothing"),
    ],
)
def test_a_picture_that_lacks_something_fails(
    said: list[tuple[str, object]], complaint: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def photograph(address: str, out: Path, width: int, height: int) -> None:
        for path, what in said:
            post(address + path, what)

    monkeypatch.setattr(picture, "photograph", photograph)
    if complaint is None:
        picture.draw(CONTENT, {}, tmp_path / "x.png")
    else:
        with pytest.raises(browser.DrawingFailed, match=complaint):
            picture.draw(CONTENT, {}, tmp_path / "x.png")
