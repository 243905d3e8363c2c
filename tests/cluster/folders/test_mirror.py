"""Folders of another host: served as they are, mirrored once, verified, and nothing beside them."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lab.cluster.folders.connections import Agent, Connections
from areal_lab.cluster.folders.mirror import folder_url, mirror
from areal_lab.cluster.folders.replies import (
    Damaged,
    NotHeld,
    OtherIncarnation,
    Refused,
    Unreachable,
)
from areal_lab.cluster.folders.served import Folders, Listing
from areal_lab.engines.keys import authorization
from tests.cluster.folders.agent import KEY, Running, running_agent
from tests.cluster.folders.proxy import altered

LARGE_BYTES = (17 << 20) + 5
"""Of the largest file: two requests."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a large file, an empty one, a subfolder and names that need quoting."""
    root = tmp_path_factory.mktemp("host-a")
    made = root / "model"
    (made / "trainer" / "rank 0").mkdir(parents=True)
    (made / "config.json").write_text("{}")
    (made / "empty").touch()
    (made / "trainer" / "rank 0" / "state#1?.pt").write_bytes(b"state")
    large = np.random.default_rng(0).integers(0, 256, LARGE_BYTES).astype(np.uint8)
    (made / "model.safetensors").write_bytes(large.data)
    (root / "secret").write_text("not served")
    return made


@pytest.fixture(scope="module")
def agent(folder: Path) -> Iterator[Agent]:
    with running_agent(folders={"w v1": str(folder)}) as running:
        yield running.agent


def content(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def request(agent: Agent, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(agent.address)
    connection.request("GET", path, headers=authorization(KEY))
    reply = connection.getresponse()
    found = reply.status, reply.read()
    connection.close()
    return found


def sent_bytes(agent: Agent) -> int:
    return int(request(agent, "/sent")[1])


def test_a_mirror_equals_the_folder(
    agent: Agent, folder: Path, tmp_path: Path, connections: Connections
) -> None:
    seen: list[tuple[int, int]] = []
    found = mirror(
        folder_url(agent, "w v1"),
        tmp_path / "deep" / "v1",
        connections,
        incarnation="1",
        progress=lambda done, total: seen.append((done, total)),
    )
    assert content(found.path) == content(folder)
    assert found.fetched_bytes == sum(map(len, content(folder).values()))
    assert max(seen) == (found.fetched_bytes, found.fetched_bytes)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == [
        "v1"
    ]  # no lock, nothing partial


def test_a_second_mirror_fetches_nothing(
    agent: Agent, tmp_path: Path, connections: Connections
) -> None:
    mirror(folder_url(agent, "w v1"), tmp_path / "v1", connections)
    before = sent_bytes(agent)
    assert mirror(folder_url(agent, "w v1"), tmp_path / "v1", connections).fetched_bytes == 0
    assert sent_bytes(agent) == before


FETCH = """
import sys
from pathlib import Path
from areal_lab.cluster.folders.connections import Connections
from areal_lab.cluster.folders.mirror import mirror
sys.stdin.readline()
print(mirror(sys.argv[1], Path(sys.argv[2]), Connections(sys.argv[3])).fetched_bytes)
"""


def test_engines_that_ask_at_the_same_time_fetch_once(
    agent: Agent, folder: Path, tmp_path: Path, connections: Connections
) -> None:
    url, size = folder_url(agent, "w v1"), sum(map(len, content(folder).values()))
    before = sent_bytes(agent)
    engines = [
        subprocess.Popen(
            [sys.executable, "-c", FETCH, url, str(tmp_path / "v1"), KEY],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for engine in engines:
        assert engine.stdin is not None
        engine.stdin.write("\n")
        engine.stdin.flush()
    with ThreadPoolExecutor(3) as pool:
        threads = [pool.submit(mirror, url, tmp_path / "v1", connections) for _ in range(3)]
    fetched = [one.result().fetched_bytes for one in threads]
    fetched += [int(engine.communicate()[0]) for engine in engines]
    assert sorted(fetched) == [0, 0, 0, 0, size]
    assert sent_bytes(agent) - before == size
    assert content(tmp_path / "v1") == content(folder)


def test_a_killed_mirror_is_fetched_again(
    agent: Agent, folder: Path, tmp_path: Path, connections: Connections
) -> None:
    (tmp_path / ".v1.mirror").mkdir()
    (tmp_path / ".v1.mirror" / "of a killed process").touch()
    (tmp_path / ".v1.mirror-lock").touch()
    mirror(folder_url(agent, "w v1"), tmp_path / "v1", connections)
    assert content(tmp_path / "v1") == content(folder)


@pytest.mark.parametrize("what", ["flipped", "truncated", "listed size"])
def test_damaged_bytes_leave_nothing(
    what: str, agent: Agent, tmp_path: Path, connections: Connections
) -> None:
    def alter(path: str, headers: dict[str, str], body: bytes) -> tuple[dict[str, str], bytes]:
        if what == "listed size" and path == "/folders/w%20v1":
            value = json.loads(body)
            value["files"][0][1] += 1
            body = json.dumps(value).encode()
            headers["content-length"] = str(len(body))
        elif path.endswith("model.safetensors"):
            if what == "flipped":
                body = bytes([body[0] ^ 1]) + body[1:]
            elif what == "truncated":
                body = body[:1000]
        return headers, body

    errors = {
        "flipped": (Damaged, "model.safetensors arrived with checksum .* fetch it once more"),
        "truncated": (Unreachable, "the connection closed after 1,000 of"),
        "listed size": (Damaged, "config.json at .*: 2 bytes instead of 3"),
    }
    with altered(agent, alter) as behind, pytest.raises(errors[what][0], match=errors[what][1]):
        mirror(folder_url(behind, "w v1"), tmp_path / "v1", connections)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "a/../../b", "", "a//b", "..", "a\\b"]
)
def test_a_listing_cannot_write_beside_the_folder(
    name: str, agent: Agent, tmp_path: Path, connections: Connections
) -> None:
    def alter(path: str, headers: dict[str, str], body: bytes) -> tuple[dict[str, str], bytes]:
        if path == "/folders/w%20v1":
            body = json.dumps({"files": [[name, 1, "00"]]}).encode()
            headers["content-length"] = str(len(body))
        return headers, body

    with altered(agent, alter) as behind, pytest.raises(Damaged, match="leads out of the folder"):
        mirror(folder_url(behind, "w v1"), tmp_path / "v1", connections)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "path",
    [
        *("../secret", "..%2fsecret", "%2e%2e/secret", "%2e%2e%2fsecret", "./config.json"),
        *("trainer/../config.json", "/etc/passwd", "%2fetc%2fpasswd", "trainer", "trainer/"),
        *("config.json/", "config.json%00", "..%5csecret", "....//secret", "%252e%252e/secret"),
    ],
)
def test_paths_that_leave_a_folder_are_unknown(agent: Agent, path: str) -> None:
    status, body = request(agent, f"/folders/w%20v1/{path}")
    assert status in (404, 405)
    assert b"not served" not in body


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            ["..", ".", "%2e%2e", "%2f", "/", "secret", "config.json", "%5c", "trainer"]
        ),
        max_size=7,
    )
)
def test_no_path_leaves_a_folder(agent: Agent, parts: list[str]) -> None:
    status, body = request(agent, "/folders/w%20v1/" + "".join(parts))
    assert status == 404 or body == b"{}" or (not parts and status in (200, 307))


def test_folders_that_are_removed_are_served_no_longer(tmp_path: Path) -> None:
    folders = Folders()
    for version in range(50):  # of which a run keeps two
        (tmp_path / f"v{version}").mkdir()
        (tmp_path / f"v{version}" / "weights").touch()
        folders.register(f"v{version}", tmp_path / f"v{version}")
        if version >= 2:
            shutil.rmtree(tmp_path / f"v{version - 2}")
        assert len(folders._folders) <= 3
    assert folders.names() == ("v48", "v49")
    shutil.rmtree(tmp_path / "v48")
    with pytest.raises(NotHeld, match=r"no folder 'v48' is served here; there are \['v49'\]"):
        folders.listing("v48")
    with pytest.raises(NotHeld, match="no folder 'v48'"), folders.reading("v48", "weights"):
        pass
    assert len(folders.listing("v49").files) == 1


def test_links_that_lead_out_are_refused(tmp_path: Path) -> None:
    served = tmp_path / "served"
    served.mkdir()
    (tmp_path / "blob").write_text("weights")
    (served / "inside").write_text("x")
    (served / "alias").symlink_to("inside")
    folders = Folders()
    folders.register("f", served)
    assert [file.name for file in folders.listing("f").files] == ["alias", "inside"]
    (served / "model").symlink_to(tmp_path / "blob")
    with pytest.raises(
        Refused, match=r"a link that leads out .* register it with follow_links=True"
    ):
        folders.listing("f")
    folders.register("f", served, follow_links=True)  # the cache of Hugging Face models
    assert [file.size_bytes for file in folders.listing("f").files] == [1, 1, 7]
    (served / "pipe").unlink(missing_ok=True)
    os.mkfifo(served / "pipe")
    assert len(folders.listing("f").files) == 3
    (served / "broken").symlink_to("nothing")
    with pytest.raises(NotHeld, match="broken cannot be read"):
        folders.listing("f")


def test_a_file_that_changed_after_it_was_listed_is_not_mixed(
    agent: Agent, folder: Path, tmp_path: Path, connections: Connections
) -> None:
    def alter(path: str, headers: dict[str, str], body: bytes) -> tuple[dict[str, str], bytes]:
        if path.endswith("config.json"):
            headers["x-areal-lab-checksum"] = "00"
        return headers, body

    with altered(agent, alter) as behind, pytest.raises(Damaged, match="changed after it was"):
        mirror(folder_url(behind, "w v1"), tmp_path / "v1", connections)
    assert content(folder)  # and a changed file has another checksum:
    folders, changing = Folders(), tmp_path / "c"
    changing.mkdir()
    folders.register("c", changing)
    (changing / "file").write_text("old")
    before = folders.listing("c")
    (changing / "new").write_text("new")
    (changing / "new").rename(changing / "file")
    assert folders.listing("c") != before


def test_an_existing_folder_is_never_overwritten(
    agent: Agent, tmp_path: Path, connections: Connections
) -> None:
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "mine").touch()
    with pytest.raises(ValueError, match=r"exists and differs from .*; remove it, or use another"):
        mirror(folder_url(agent, "w v1"), tmp_path / "v1", connections)
    assert [path.name for path in (tmp_path / "v1").iterdir()] == ["mine"]


def test_a_mirror_with_one_other_byte_is_not_taken_for_the_folder(
    agent: Agent, tmp_path: Path, connections: Connections
) -> None:
    mirror(folder_url(agent, "w v1"), tmp_path / "v1", connections)
    (tmp_path / "v1" / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="exists and differs from"):
        mirror(folder_url(agent, "w v1"), tmp_path / "v1", connections)
    assert (tmp_path / "v1" / "config.json").read_text() == "[]"


def test_unknown_folders_incarnations_and_urls_are_refused(
    agent: Agent, tmp_path: Path, connections: Connections
) -> None:
    def fetched(url: str, **options: Any) -> None:
        mirror(url, tmp_path / "v1", connections, **options)

    with pytest.raises(NotHeld, match=r"no folder 'v2' is served here; there are \['w v1'\]"):
        fetched(folder_url(agent, "v2"))
    with pytest.raises(OtherIncarnation, match="is incarnation 1, not incarnation 2"):
        fetched(folder_url(agent, "w v1"), incarnation="2")
    with pytest.raises(
        ValueError, match="a folder of another host is http://HOST:PORT/folders/NAME"
    ):
        fetched(f"http://{agent.address}/folder/x")
    assert request(agent, "/folders") == (200, b'{"folders":["w v1"]}')
    folders = Folders()
    with pytest.raises(ValueError, match="it is no folder"):
        folders.register("a", tmp_path / "nothing")
    with pytest.raises(ValueError, match="use a name without a slash"):
        folders.register("a/b", tmp_path)
    assert folders.names() == ()
    with pytest.raises(Damaged, match="no listing"):
        Listing.from_json({"files": [1]})


def test_a_mirror_can_be_mirrored(
    agent: Agent, folder: Path, tmp_path: Path, connections: Connections
) -> None:
    first = mirror(folder_url(agent, "w v1"), tmp_path / "host-b", connections)
    with running_agent(folders={"w": str(first.path)}) as second:
        assert isinstance(second, Running)
        mirror(folder_url(second.agent, "w"), tmp_path / "host-c", connections)
    assert content(tmp_path / "host-c") == content(folder)


def test_servers_and_clients_load_no_torch() -> None:
    script = (
        "import sys; from areal_lab.cluster.folders import server, mirror; "
        "import areal_lab.data.arrays; print('torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "False"
