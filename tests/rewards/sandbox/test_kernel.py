"""Parts of the containment alone: each has to hold without the others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from areal_lab.rewards.sandbox import confine, kernel


def run(*lines: str) -> str:
    """The output of a program that begins with the module; it must end well."""
    program = "\n".join(("from areal_lab.rewards.sandbox import kernel", "import os", *lines))
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_landlock_leaves_the_files_that_are_named(tmp_path: Path) -> None:
    for name in ("read", "write", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    told = run(
        f"os.chdir({str(tmp_path)!r})",
        "kernel.restrict_files(['/usr', 'read'], ['write'], ['/dev/null'])",
        "def tried(what, *given):",
        "    try:",
        "        what(*given)",
        "        return 1",
        "    except PermissionError:",
        "        return 0",
        "for name in ('read', 'write', 'other'):",
        "    print(tried(open, f'{name}/file'), tried(open, f'{name}/file', 'a'),",
        "          tried(open, f'{name}/new', 'w'), tried(os.mkdir, f'{name}/folder'))",
        "print(tried(open, '/dev/null', 'w'), tried(open, '/dev/zero'), tried(os.listdir, '.'))",
        "print(tried(open, '/etc/passwd'), tried(os.rename, 'write/file', 'other/moved'))",
    )
    assert told.splitlines() == ["1 0 0 0", "1 1 1 1", "0 0 0 0", "1 0 1", "0 0"]


def test_seccomp_denies_calls_and_leaves_what_programs_need() -> None:
    told = run(
        "import ctypes, socket, threading",
        "kernel.drop_privileges()",
        "kernel.restrict_calls()",
        "libc = ctypes.CDLL(None, use_errno=True)",
        "print(libc.unshare(0x10000000), ctypes.get_errno())",
        "print(libc.syscall(435, None, 0), ctypes.get_errno())  # clone3",
        "print(libc.syscall(1000), ctypes.get_errno())",
        "try: socket.socket(socket.AF_INET)",
        "except PermissionError as error: print(error)",
        "one, other = socket.socketpair()",
        "thread = threading.Thread(target=one.send, args=[b'sent'])",
        "thread.start(); thread.join()",
        "print(other.recv(9))",
        "if not os.fork(): os._exit(0)",
        "print(os.wait()[1])",
    )
    expected = ["-1 1", "-1 38", "-1 38", "[Errno 1] Operation not permitted", "b'sent'", "0"]
    assert told.splitlines() == expected


def test_privileges_are_gone_for_good() -> None:
    told = run(
        "kernel.drop_privileges()",
        "status = dict(line.split(':', 1) for line in open('/proc/self/status'))",
        "print({name: status[name].strip() for name in ('CapPrm', 'CapEff', 'NoNewPrivs')})",
    )
    assert told.strip() == str({"CapPrm": "0" * 16, "CapEff": "0" * 16, "NoNewPrivs": "1"})


def test_another_machine_is_refused() -> None:
    told = run(
        "os.uname = lambda: type('', (), {'machine': 'riscv64'})",
        "try: kernel.restrict_calls()",
        "except OSError as error: print(error)",
    )
    assert "the machine is riscv64, but must be x86_64 or aarch64" in told


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_denied_system_calls_have_numbers_of_their_own(machine: str) -> None:
    numbers = kernel.denied_calls(machine)
    assert len(set(numbers.values())) == len(numbers)
    assert {"ptrace", "mount", "unshare", "setns", "memfd_create", "bpf"} < numbers.keys()
    assert not set(numbers.values()) & {kernel._CLONE[machine], kernel._SOCKET[machine]}


def test_the_root_that_is_made_is_small_and_read_only(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "file").write_text("text")
    program = f"""
import os
from areal_lab.rewards.sandbox import confine
confine.USER = 0  # the only user that `unshare` knows
confine.make_root(["/usr", {str(tmp_path)!r}], [("/lib64", "usr/lib64")], 1 << 20)
print(sorted(os.listdir("/")), sorted(os.listdir("/dev")), open({str(tmp_path / "file")!r}).read())
for path in ("/new", "/usr/new", {str(tmp_path / "file")!r}, "/dev/new", "/sandbox/new"):
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT))
    except OSError as error:
        print(error.strerror)
try:
    open("/sandbox/large", "wb").write(bytes(2 << 20))
except OSError as error:
    print(error.strerror)
"""
    command = ["unshare", "--user", "--map-root-user", "--mount", sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.stderr == ""
    assert ended.stdout.splitlines() == [
        f"['dev', 'lib64', 'sandbox', 'tmp', 'usr'] {sorted((*confine.DEVICES,))} text",
        *["Read-only file system"] * 4,
        "No space left on device",
    ]


def test_a_program_begins_when_its_start_has_been_told() -> None:
    """Init is slow: it waits for the program to write first, but not for ever."""
    told = run(
        "import select",
        "from areal_lab.rewards.sandbox import cell",
        "cell.confine = lambda setup: None",
        "seen, tell = os.pipe()",
        "if os.fork() == 0:",
        "    os.dup2(seen, 10), os.dup2(tell, 11), os.dup2(tell, cell.STATUS)",
        "    cell._signal.signal = lambda *given: select.select([10], [], [], 0.3)",
        "    cell.live({'path': []}, {'source': 'import os; os.write(11, b\"program\")'})",
        "os.close(tell)",
        "with os.fdopen(seen, 'rb') as file: print(file.read())",
    )
    assert told == f"{b'Sprogram' + b'E' + bytes(4)!r}\n"
