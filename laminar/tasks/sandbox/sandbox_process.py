"""The processes of a sandbox: python -I -S sandbox_process.py, with a number for each of LIMITS.

Reads   frames on descriptor 0, the channel (little-endian u32 length), with a program each
Gives   on the channel b"r" when code can be run and b"." after each program; output on stdout; on
        stderr the name of a missing part of the sandbox, with exit code MISSING
Starts  pid 1 of new namespaces, and from it the process that runs the code

    this process    watches the channel; when its other end is closed, it kills pid 1
    pid 1           makes the root and waits for the code; its end kills all that the code started
    the code        runs without privileges and without the machine's files, network and processes

Covered: the effects of system calls that the kernel confines to the namespaces. Not covered: kernel
bugs, and timing side channels between programs.

Tools wait for the start, so only modules that are built in, or nearly, are imported; others when
needed. The process that runs the code has nothing of the run in its memory.
"""

from __future__ import annotations

import _ast
import ctypes
import errno
import os
import resource
import select
import struct
import sys

TYPE_CHECKING = False  # avoids the import of typing
if TYPE_CHECKING:
    from types import CodeType

LIMITS = ("memory_mb", "work_mb", "processes", "unsafe")
MISSING = 97  #: exit code if a part of the sandbox is missing
LENGTH = struct.Struct("<I")
READY, DONE = b"r", b"."
CODE = "<code>"  #: file name of a program in tracebacks
FOLDERS = ("/usr", "/lib", "/lib64", "/bin")  #: machine's folders that the interpreter reads
DEVICES = ("null", "zero", "urandom")
INSIDE_ID = 1000  #: user and group id of the code in its namespace

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT = 1, 2, 4, 32
MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 4096, 16384, 1 << 18, 2
MOUNT_ATTRS = 1 | 2 | 4  #: read-only, no set-user-id, no devices
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 22, 24, 38
SYS_CAPSET, SYS_PIVOT_ROOT, SYS_MOUNT_SETATTR = 126, 155, 442  #: x86_64 numbers, as all below
SYS_SOCKET, SYS_CLONE, SYS_CLONE3 = 41, 56, 435
CAPABILITY_VERSION = 0x20080522
SIGKILL, ONLY_AST, CHANNEL = 9, 0x400, 0
SOCKET_FAMILIES = (1, 2, 10)
"""Allowed families: Unix, IPv4, IPv6. Others reach beyond the namespaces (vsock), or parts of the
kernel that code does not need."""
#: System calls that code does not need and that have been used to escape from sandboxes, or that
#: allocate memory outside the process's limits.
REFUSED_CALLS = {
    "shmget": 29,
    "semget": 64,
    "msgget": 68,
    "ptrace": 101,
    "syslog": 103,
    "personality": 135,
    "pivot_root": 155,
    "chroot": 161,
    "acct": 163,
    "mount": 165,
    "umount2": 166,
    "swapon": 167,
    "swapoff": 168,
    "reboot": 169,
    "init_module": 175,
    "delete_module": 176,
    "quotactl": 179,
    "mq_open": 240,
    "kexec_load": 246,
    "add_key": 248,
    "request_key": 249,
    "keyctl": 250,
    "unshare": 272,
    "perf_event_open": 298,
    "open_by_handle_at": 304,
    "setns": 308,
    "process_vm_readv": 310,
    "process_vm_writev": 311,
    "kcmp": 312,
    "finit_module": 313,
    "memfd_create": 319,
    "kexec_file_load": 320,
    "bpf": 321,
    "userfaultfd": 323,
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "pidfd_getfd": 438,
    "mount_setattr": 442,
    "memfd_secret": 447,
}
_libc = ctypes.CDLL(None, use_errno=True)


class MissingPart(Exception):
    """A missing part of the sandbox; the message names the part and the reason."""


def main() -> None:
    limits = dict(zip(LIMITS, map(int, sys.argv[1:]), strict=True))
    try:
        if not limits["unsafe"]:
            _unshare_namespaces()
        first = os.fork()
    except MissingPart as missing:
        _exit_missing(missing)
    if first == 0:
        _run_first_process(limits)
    os._exit(_wait_for_end(first))


def _wait_for_end(first: int) -> int:
    """Wait for pid 1, or kill it when the channel is closed; return its exit code."""
    poll = select.poll()
    poll.register(CHANNEL, select.POLLRDHUP)
    poll.register(os.pidfd_open(first), select.POLLIN)
    if all(fd == CHANNEL for fd, _ in poll.poll()):
        os.kill(first, SIGKILL)
    _, status = os.waitpid(first, 0)
    return os.waitstatus_to_exitcode(status) & 0xFF


def _exit_missing(missing: MissingPart) -> None:
    os.write(2, str(missing).encode())
    os._exit(MISSING)


def _read_frame(channel: int) -> bytes | None:
    """Return the next frame, or None at the end of the channel."""
    head = _read_exactly(channel, LENGTH.size)
    return None if head is None else _read_exactly(channel, LENGTH.unpack(head)[0])


def _read_exactly(channel: int, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = os.read(channel, size - len(parts))
        if not part:
            return None
        parts += part
    return bytes(parts)


# --- namespaces and the root -------------------------------------------------------------------


def _check_result(result: int, part: str) -> None:
    if result < 0:
        raise MissingPart(f"{part} ({os.strerror(ctypes.get_errno())})")


def _unshare_namespaces() -> None:
    """Enter a user namespace, and other namespaces whose pid 1 is the next forked process."""
    if (machine := os.uname().machine) != "x86_64":
        raise MissingPart(f"the system call filter (seccomp), which supports x86_64, not {machine}")
    user, group, pid = os.geteuid(), os.getegid(), os.getpid()
    asks, told = os.pipe()
    writer = os.fork()
    if writer == 0:  # outside the namespaces, where other ids may be mapped
        os.close(told)
        os.read(asks, 1)
        os._exit(_map_ids(pid, user, group))
    os.close(asks)
    try:
        _check_result(_libc.unshare(CLONE_NEWUSER), "user namespaces")
        for flag, name in (
            (CLONE_NEWNS, "mount"),
            (CLONE_NEWPID, "process"),
            (CLONE_NEWNET, "network"),
            (CLONE_NEWIPC, "IPC"),
            (CLONE_NEWUTS, "host name"),
        ):
            _check_result(_libc.unshare(flag), f"{name} namespaces")
    finally:
        os.close(told)
        _, status = os.waitpid(writer, 0)
    if status:
        reason = os.strerror(os.waitstatus_to_exitcode(status))
        raise MissingPart(f"user ids of a user namespace ({reason})")


def _map_ids(pid: int, user: int, group: int) -> int:
    """Map the ids of a user namespace; return 0 or the errno.

    Root maps the code to an otherwise unused id; other users can map only their own.
    """
    own = _free_id(pid) if user == 0 else None
    place = f"/proc/{pid}"
    try:
        if own is None:
            _write(f"{place}/setgroups", "deny")
        for name, outside in (("uid_map", user), ("gid_map", group)):
            lines = f"{INSIDE_ID} {outside if own is None else own} 1\n"
            _write(f"{place}/{name}", lines if own is None else f"0 {outside} 1\n{lines}")
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def _free_id(pid: int) -> int | None:
    """Return a high id that no user has; None if this root has too few ids itself."""
    with open("/proc/self/uid_map") as lines:
        inside, _, count = map(int, lines.readline().split())
    end = min(inside + count, 1 << 31)
    return None if end < 1 << 16 else end - 2 - pid % (1 << 14)


def _write(path: str, text: str) -> None:
    file = os.open(path, os.O_WRONLY)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)


def _mount_path(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    words = [word.encode() or None for word in (source, target, kind)]
    result = _libc.mount(*words, ctypes.c_ulong(flags), data.encode() or None)
    _check_result(result, f"mounts ({target})")


def _make_root(work_mb: int) -> None:
    """Make a new root: the interpreter and its libraries read-only, and a writable /work."""
    base, python = "/tmp", os.path.realpath(sys.base_prefix)
    _mount_path("none", "/", "", MS_REC | MS_PRIVATE)
    quiet = MS_NOSUID | MS_NODEV
    _mount_path("tmpfs", base, "tmpfs", quiet, "size=1m,mode=755")
    for folder in dict.fromkeys((*FOLDERS, python)):
        if os.path.islink(folder):
            os.symlink(os.readlink(folder), base + folder)
        elif os.path.isdir(folder) and not os.path.exists(base + folder):
            _bind_folder(folder, base)
    os.mkdir(f"{base}/dev", 0o755)
    for name in DEVICES:
        os.close(os.open(f"{base}/dev/{name}", os.O_CREAT))
        _mount_path(f"/dev/{name}", f"{base}/dev/{name}", "", MS_BIND)
    for folder in ("old", "work"):
        os.mkdir(f"{base}/{folder}")
    _mount_path("tmpfs", f"{base}/work", "tmpfs", quiet, f"size={work_mb}m,mode=777,nr_inodes=4096")
    os.symlink("work", f"{base}/tmp")
    old = f"{base}/old"
    _check_result(_libc.syscall(SYS_PIVOT_ROOT, base.encode(), old.encode()), "pivot_root")
    os.chdir("/")
    _check_result(_libc.umount2(b"/old", MNT_DETACH), "umount of the host's files")
    os.rmdir("/old")
    _mount_path("", "/", "", MS_REMOUNT | MS_BIND | MS_RDONLY | quiet)


def _bind_folder(folder: str, base: str) -> None:
    """Bind a folder of the machine below the base, read-only, with all mounts in it."""
    target = base + folder
    os.makedirs(target, 0o755)
    _mount_path(folder, target, "", MS_BIND | MS_REC)
    attributes = struct.pack("QQQQ", MOUNT_ATTRS, 0, 0, 0)
    where = (AT_FDCWD, target.encode(), AT_RECURSIVE, attributes, len(attributes))
    _check_result(_libc.syscall(SYS_MOUNT_SETATTR, *where), "mount_setattr")


# --- the two processes within ------------------------------------------------------------------


def _run_first_process(limits: dict[str, int]) -> None:
    """Run as pid 1 and never return."""
    try:
        _libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
        if not limits["unsafe"]:
            os.umask(0)
            _make_root(limits["work_mb"])
            os.umask(0o077)
        code = os.fork()
        if code == 0:
            _drop_privileges(limits)
            _serve_programs()
        os.close(CHANNEL)
        os._exit(_reap_children(code))
    except MissingPart as missing:
        _exit_missing(missing)
    except OSError as error:
        _exit_missing(MissingPart(f"{error.strerror} ({error.filename or 'a system call'})"))
    finally:
        os._exit(1)


def _reap_children(code: int) -> int:
    """Reap orphans until the code ends, and return its exit code; our end kills the others."""
    while True:
        pid, status = os.wait()
        if pid == code:
            ended = os.waitstatus_to_exitcode(status)
            return 128 - ended if ended < 0 else ended


def _drop_privileges(limits: dict[str, int]) -> None:
    """Drop all remaining privileges and set the limits; the order matters."""
    is_root = os.getuid() != INSIDE_ID
    if not limits["unsafe"]:
        os.chdir("/work")
        if is_root:
            os.setgroups([])
            os.setresgid(INSIDE_ID, INSIDE_ID, INSIDE_ID)
    memory = limits["memory_mb"] << 20
    for what, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, limits["work_mb"] << 20),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_MEMLOCK, 1 << 16),
        (resource.RLIMIT_CORE, 0),
        *(() if limits["unsafe"] else ((resource.RLIMIT_NPROC, limits["processes"]),)),
    ):
        _, allowed = resource.getrlimit(what)
        most = most if allowed < 0 else min(most, allowed)  # limits cannot be raised here
        resource.setrlimit(what, (most, most))
    if not limits["unsafe"]:
        for capability in range(64):
            _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
        if is_root:
            os.setresuid(INSIDE_ID, INSIDE_ID, INSIDE_ID)
        head = struct.pack("Ii", CAPABILITY_VERSION, 0)
        _check_result(_libc.syscall(SYS_CAPSET, head, bytes(24)), "to drop capabilities")
        _filter_calls()
    _libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)  # the change of credentials has reset it


def _filter_calls() -> None:
    """Refuse system calls to this process and all that it starts, by a seccomp filter."""
    load, equal, greater, bits, ends = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill, refuse = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM
    absent = 0x00050000 | errno.ENOSYS

    def line(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("HBBI", code, yes, no, value)

    lines = [line(load, 4), line(equal, 0xC000003E, 1, 0), line(ends, kill)]  # x86_64
    lines += [line(load, 0), line(greater, 0x40000000, 0, 1), line(ends, kill)]  # not x32
    for number in REFUSED_CALLS.values():
        lines += [line(equal, number, 0, 1), line(ends, refuse)]
    lines += [line(equal, SYS_CLONE3, 0, 1), line(ends, absent)]  # seccomp cannot read its flags
    spaces = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC
    spaces |= CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET | 0x02000000  # and of cgroups
    lines += [line(equal, SYS_CLONE, 0, 4), line(load, 16), line(bits, spaces, 0, 1)]
    lines += [line(ends, refuse), line(ends, allow)]
    lines += [line(equal, SYS_SOCKET, 0, 2 + len(SOCKET_FAMILIES)), line(load, 16)]
    for i, family in enumerate(SOCKET_FAMILIES):
        lines += [line(equal, family, len(SOCKET_FAMILIES) - i, 0)]
    lines += [line(ends, refuse), line(ends, allow)]

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("lines", ctypes.c_char_p))

    program = Program(len(lines), b"".join(lines))
    _check_result(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    result = _libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0)
    _check_result(result, "a system call filter (seccomp)")


# --- the code ----------------------------------------------------------------------------------


def _serve_programs() -> None:
    """Run programs one after the other in a shared `__main__` module; never return."""
    module = sys.modules["__main__"] = type(sys)("__main__")
    channel = os.dup(CHANNEL)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(1, 2)
    os.write(channel, READY)
    try:
        while (program := _read_frame(channel)) is not None:
            _run(program.decode(), vars(module))
            os.write(channel, DONE)
    except OSError:
        pass  # the other end is closed
    os._exit(0)


def _run(program: str, names: dict[str, object]) -> None:
    """Run a program and print the value of a last expression, as a notebook does."""
    own = 1
    try:
        parts = _compile_parts(program)
        own = 0
        for part, shows in parts:
            if shows:
                value = eval(part, names)  # noqa: S307 - the purpose of this process
                if value is not None:
                    print(repr(value))
            else:
                exec(part, names)
    except SystemExit as left:
        _flush()
        os._exit(left.code if isinstance(left.code, int) else int(left.code is not None))
    except BaseException as error:
        _show_error(error, own)
    _flush()


def _show_error(error: BaseException, is_ours: int) -> None:
    import traceback  # slow, and rarely needed

    try:
        trace = error.__traceback__ and error.__traceback__.tb_next
        traceback.print_exception(type(error), error, None if is_ours else trace)
    except BaseException:  # an exception's __str__ may be the program's code too
        print(type(error).__name__)


def _compile_parts(program: str) -> list[tuple[CodeType, bool]]:
    """Compile the program to one or two parts, each with whether it has a value to show."""
    tree = compile(program, CODE, "exec", ONLY_AST)
    last: list[tuple[CodeType, bool]] = []
    if tree.body and isinstance(tree.body[-1], _ast.Expr):
        value = _ast.Expression(tree.body.pop().value)
        last = [(compile(value, CODE, "eval"), True)]
    return [(compile(tree, CODE, "exec"), False), *last]


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            pass  # the code may have closed or replaced it


if __name__ == "__main__":
    main()
