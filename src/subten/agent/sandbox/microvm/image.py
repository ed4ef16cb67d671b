"""The guest of microVMs, made of Debian's packages: a kernel, a read-only root file system, and what starts both.

Building fetches packages once, with the machine's own apt, into a folder of subten's; after that nothing is fetched.
Nothing is installed on the machine and no package's scripts run: packages are only unpacked. Needs no root.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from subten.agent.sandbox.guest import agent as guest_agent
from subten.config import home
from subten.errors import SandboxError

RECIPE = 3
"""Grows when an image built by an older version no longer fits; such images are built again."""

PACKAGES = (
    *(
        "bash",
        "coreutils",
        "dash",
        "diffutils",
        "findutils",
        "gawk",
        "git",
        "grep",
        "gzip",
        "libc-bin",
        "make",
        "patch",
        "perl",
    ),
    *("procps", "python3", "python3-pytest", "sed", "tar", "util-linux", "xz-utils"),
)
"""What commands find in the guest, beside what these depend on."""

WAITING_SHELL = "usr/lib/subten/shell.so"
"""Where the guest has what makes a shell wait for commands: `guest/shell.c`, compiled."""

_COMPILER = ("tcc", "libc6-dev", "linux-libc-dev")
"""What that takes; not in the image."""

_KERNEL = "linux-image-cloud-amd64"
_MODULES = (
    # In the order in which they can be loaded.
    *("drivers/virtio/virtio_ring", "drivers/virtio/virtio", "drivers/virtio/virtio_mmio"),
    *("drivers/block/virtio_blk", "drivers/char/virtio_console", "lib/libcrc32c", "fs/erofs/erofs"),
    "fs/overlayfs/overlay",
)
_PROGRAMS = {
    "apt-get": "apt",
    "dpkg-deb": "dpkg",
    "tar": "tar",
    "lz4": "lz4",
    "mkfs.erofs": "erofs-utils",
}
_NOT_NEEDED = ("usr/share/doc", "usr/share/man", "usr/share/info", "usr/share/locale", "usr/share/lintian", "boot")
_LZ4_LEGACY = b"\x02\x21\x4c\x18"
_MOUNT_POINTS = ("dev", "proc", "sys", "run", "tmp", "workspace", "home/agent", "var/tmp")


@dataclass(frozen=True)
class Image:
    """A guest on disk.

    Attributes:
        folder: holds `kernel`, `root.erofs`, `busybox`, the kernel's modules and `image.json`.
        packages: every Debian package in it, with its version.
    """

    folder: Path
    packages: Mapping[str, str] = field(hash=False)

    @property
    def kernel(self) -> Path:
        """An uncompressed kernel, which starts without unpacking itself."""
        return self.folder / "kernel"

    @property
    def root(self) -> Path:
        """The root file system, EROFS."""
        return self.folder / "root.erofs"

    def initial_ramdisk(self, disk_mib: int, guest: str) -> bytes:
        """What the kernel starts: busybox mounts the root with a writable layer in memory and starts the guest agent.

        Args:
            disk_mib: size of that layer.
            guest: limits of commands, JSON for the guest agent.
        """
        modules = [f"modules/{Path(module).name}.ko" for module in _MODULES]
        present = [name for name in modules if (self.folder / name).exists()]
        script = _INIT.format(modules=" ".join(present), disk_mib=disk_mib, guest=guest, shell=WAITING_SHELL)
        files = {
            "init": (0o755, script.encode()),
            "busybox": (0o755, (self.folder / "busybox").read_bytes()),
            "agent.py": (0o644, Path(guest_agent.__file__).read_bytes()),
            **{name: (0o644, (self.folder / name).read_bytes()) for name in present},
        }
        return _cpio(("dev", "proc", "sys", "lower", "upper", "root", "modules"), files)


_INIT = """#!/busybox sh
set -e
/busybox mount -t devtmpfs dev /dev
/busybox mount -t proc proc /proc
/busybox mount -t sysfs sys /sys
for module in {modules}; do /busybox insmod /$module; done
for try in $(/busybox seq 200); do [ -b /dev/vda ] && break; /busybox usleep 10000; done
/busybox mount -t erofs -o ro /dev/vda /lower
/busybox mount -t tmpfs -o size={disk_mib}m,mode=755 upper /upper
/busybox mkdir /upper/files /upper/work /upper/shm
/busybox mount -t overlay -o lowerdir=/lower,upperdir=/upper/files,workdir=/upper/work overlay /root
/busybox cp /agent.py /root/run/agent.py
/busybox chown 1000:1000 /root /root/workspace /root/home/agent
/busybox chmod 1777 /root/tmp /root/var/tmp /upper/shm
for folder in dev proc sys; do /busybox mount --move /$folder /root/$folder; done
/busybox mkdir /root/dev/shm /root/dev/pts
/busybox mount --bind /upper/shm /root/dev/shm
/busybox mount -t devpts -o ptmxmode=666 pts /root/dev/pts
/busybox ln -s /proc/self/fd /root/dev/fd
/busybox ip link set lo up || true
start="/usr/bin/python3 -I -S -B /run/agent.py"
for try in $(/busybox seq 200); do
  for port in /root/sys/class/virtio-ports/*; do
    if [ -e $port/name ] && [ "$(/busybox cat $port/name)" = agent ]; then
      exec /busybox switch_root /root $start /dev/${{port##*/}} 1000 '{guest}' /{shell}
    fi
  done
  /busybox usleep 10000
done
echo no virtio port named agent
"""


def find_image() -> Image | None:
    """The image that was built on this machine, or None."""
    folder = _folder()
    try:
        about = json.loads((folder / "image.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return Image(folder, about["packages"])


def why_not_buildable() -> str | None:
    """What is missing to build an image; None where nothing is."""
    missing = sorted({package for program, package in _PROGRAMS.items() if shutil.which(program) is None})
    if "apt" in missing or "dpkg" in missing:
        return "guest images are built from Debian's packages; build one on Debian or Ubuntu and copy its folder here"
    return f"building a guest image needs: apt-get install {' '.join(missing)}" if missing else None


def build_image(say: Callable[[str], None] = lambda _: None) -> Image:
    """Fetch, unpack and pack. An image that is there is built anew and replaced at the end.

    Args:
        say: called with a line at each step.

    Raises:
        SandboxError: a program or package is missing, or fetching failed.
    """
    reason = why_not_buildable()
    if reason is not None:
        raise SandboxError(reason)
    folder = _folder()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="image-", dir=folder.parent) as scratch:
        work = Path(scratch)
        say("fetching Debian packages")
        packages = _fetch(work / "packages", (*PACKAGES, "busybox-static"))
        kernel = _fetch_kernel(work / "kernel-package")
        compiler = _download(work / "compiler-packages", *_COMPILER)
        say(f"unpacking {len(packages) + 1 + len(compiler)} packages")
        tree = work / "tree"
        _unpack(packages, tree)
        built = work / "built"
        (built / "modules").mkdir(parents=True)
        shutil.copy2(tree / "usr/bin/busybox" if (tree / "usr/bin/busybox").exists() else tree / "bin/busybox", built)
        _take_kernel(kernel, work / "kernel-tree", built)
        say("writing the root file system")
        _dress(tree)
        _index(tree)
        _compile_python(tree)
        _unpack(compiler, work / "compiler")
        _compile_shell(work / "compiler", tree)
        _run("mkfs.erofs", "--all-root", "-T0", "--quiet", "--", str(built / "root.erofs"), str(tree))
        versions = dict(sorted(_name_and_version(package) for package in (*packages, kernel)))
        about = {"recipe": RECIPE, "packages": versions}
        (built / "image.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        for path in (built, *built.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)  # QEMU reads them as a user of its own
        if folder.exists():
            folder.rename(work / "old")
        built.rename(folder)
    image = find_image()
    assert image is not None
    return image


def _folder() -> Path:
    return home() / "sandbox" / f"guest-{RECIPE}"


def _run(*command: str, cwd: Path | None = None) -> str:
    try:
        done = subprocess.run(command, capture_output=True, cwd=cwd, check=True, stdin=subprocess.DEVNULL)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise SandboxError(f"{command[0]} failed while the guest image was built: {lines[-1]}") from error
    except OSError as error:
        raise SandboxError(f"{command[0]} could not be run: {error}") from error
    return done.stdout.decode(errors="replace")


def _fetch(folder: Path, names: Sequence[str]) -> list[Path]:
    """The packages and all they depend on, as if nothing were installed."""
    (folder / "partial").mkdir(parents=True)
    options = {
        "Dir::State::status": "/dev/null",
        "Dir::Cache::archives": str(folder),
        "APT::Sandbox::User": "root",
        "APT::Install-Recommends": "0",
        "Debug::NoLocking": "1",
    }
    settings = [item for key, value in options.items() for item in ("-o", f"{key}={value}")]
    _run("apt-get", *settings, "--yes", "--quiet", "--download-only", "install", *names)
    return sorted(folder.glob("*.deb"))


def _fetch_kernel(folder: Path) -> Path:
    """The kernel's own package, without the tools it depends on for being installed."""
    names = re.findall(
        rf"Depends: ({_KERNEL.replace('cloud', '[0-9].*cloud')})$", _run("apt-cache", "depends", _KERNEL), re.M
    )
    if not names:
        raise SandboxError(f"apt knows no kernel package behind {_KERNEL}; run apt-get update")
    return _download(folder, names[0])[0]


def _download(folder: Path, *names: str) -> list[Path]:
    """The packages, without what they depend on."""
    folder.mkdir()
    _run("apt-get", "-o", "APT::Sandbox::User=root", "--quiet", "download", *names, cwd=folder)
    return sorted(folder.glob("*.deb"))


def _name_and_version(package: Path) -> tuple[str, str]:
    name, version = package.name.split("_")[:2]
    return name, version.replace("%3a", ":")


def _unpack(packages: Iterable[Path], tree: Path) -> None:
    """All packages into one folder, /bin and its like being links into /usr as on every installed Debian."""
    tree.mkdir()
    for name in ("bin", "sbin", "lib", "lib64"):
        (tree / "usr" / name).mkdir(parents=True)
        (tree / name).symlink_to(f"usr/{name}")
    for package in packages:
        archive = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE)
        options = ("--no-same-owner", "--keep-directory-symlink")
        unpack = ["tar", "-x", "-C", str(tree), *options]
        failed = subprocess.run(unpack, stdin=archive.stdout, stderr=subprocess.DEVNULL).returncode
        if archive.wait() or failed:
            raise SandboxError(f"{package.name} could not be unpacked")


def _take_kernel(package: Path, tree: Path, built: Path) -> None:
    _run("dpkg-deb", "-x", str(package), str(tree))
    packed = next((tree / "boot").glob("vmlinuz-*")).read_bytes()
    (built / "kernel").write_bytes(_unpack_kernel(packed, tree))
    modules = next(
        (tree / "usr/lib/modules" if (tree / "usr/lib/modules").exists() else tree / "lib/modules").iterdir()
    )
    for name in _MODULES:
        plain = modules / "kernel" / f"{name}.ko"
        if plain.exists():  # else it is built into this kernel
            shutil.copy2(plain, built / "modules")


def _unpack_kernel(packed: bytes, work: Path) -> bytes:
    """The kernel inside a bzImage. QEMU starts it at once, where the image would first unpack itself."""
    start = packed.find(_LZ4_LEGACY)
    if start < 0:
        raise SandboxError(f"the kernel of {_KERNEL} is not packed with LZ4; this version of subten can't use it")
    (work / "kernel.lz4").write_bytes(packed[start:])
    # What follows the kernel in the image is no LZ4: the program complains and has written the kernel by then.
    subprocess.run(["lz4", "-dfq", "kernel.lz4", "kernel"], cwd=work, stderr=subprocess.DEVNULL)
    kernel = (work / "kernel").read_bytes()
    if not kernel.startswith(b"\x7fELF"):
        raise SandboxError(f"the kernel of {_KERNEL} could not be unpacked")
    return kernel


def _dress(tree: Path) -> None:
    """What installing would have set up."""
    for name in _NOT_NEEDED:
        shutil.rmtree(tree / name, ignore_errors=True)
    for name in _MOUNT_POINTS:
        (tree / name).mkdir(parents=True, exist_ok=True)
    etc = tree / "etc"
    user = "agent:x:1000:1000:agent:/home/agent:/bin/bash"
    (etc / "passwd").write_text(f"root:x:0:0:root:/root:/bin/bash\n{user}\nnobody:x:65534:65534::/:/bin/false\n")
    (etc / "group").write_text("root:x:0:\nagent:x:1000:\nnogroup:x:65534:\n")
    (etc / "hosts").write_text("127.0.0.1 localhost\n")
    (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
    (etc / "machine-id").write_text("uninitialized\n")
    awk = tree / "usr/bin/awk"
    if not awk.is_symlink():
        awk.symlink_to("gawk")
    for path in tree.rglob("*"):
        if path.is_dir() and not path.is_symlink():
            path.chmod(stat.S_IMODE(path.stat().st_mode) | 0o700)


def _of_guest(tree: Path, program: Path) -> list[str]:
    """How to run one of the guest's programs here, with its own libraries."""
    loader = next((tree / "usr/lib64").glob("ld-linux-*"), None) or next((tree / "usr/lib").glob("ld-linux-*"))
    libraries = ":".join(str(path) for path in (tree / "usr/lib").glob("*-linux-gnu"))
    return [str(loader), "--library-path", libraries, str(program)]


def _index(tree: Path) -> None:
    """What starting a program reads: where libraries are, and all of the locale in one file instead of twelve.

    Without the first, every library of every program is looked for in eight folders.
    """
    _run(str(tree / "usr/sbin/ldconfig"), "-r", str(tree))
    archive = [*_of_guest(tree, tree / "usr/bin/localedef"), "--prefix", str(tree), "--add-to-archive"]
    _run(*archive, *(str(path) for path in (tree / "usr/lib/locale").iterdir() if path.is_dir()))


def _compile_python(tree: Path) -> None:
    """Byte code beside Python's modules, as installing would have written it, by the guest's own Python."""
    python = next((tree / "usr/bin").glob("python3.[0-9]*"))
    start = ["env", f"PYTHONHOME={tree}/usr", *_of_guest(tree, python), "-S", "-m"]
    # The root file system keeps no times, by which byte code would be checked otherwise.
    options = ["compileall", "-q", "--invalidation-mode", "unchecked-hash", "-s", str(tree), "-p", "/"]
    _run(*start, *options, *(str(path) for path in (tree / "usr/lib").glob("python3*")))


def _compile_shell(compiler: Path, tree: Path) -> None:
    """What makes a shell wait for commands, compiled with the guest's libraries and headers of the same release."""
    usr = compiler / "usr"
    own = next((usr / "lib").glob("*-linux-gnu")) / "tcc"
    headers = (own / "include", usr / "include", *(usr / "include").glob("*-linux-gnu"))
    target = tree / WAITING_SHELL
    target.parent.mkdir()
    options = [f"-B{own}", "-nostdinc", *(f"-I{folder}" for folder in headers), "-nostdlib", "-shared"]
    source = Path(guest_agent.__file__).with_name("shell.c")
    _run(*_of_guest(tree, usr / "bin/tcc"), *options, "-o", str(target), str(source))
    for path in (target.parent, target):
        path.chmod(0o755)


def _cpio(folders: Iterable[str], files: dict[str, tuple[int, bytes]]) -> bytes:
    """An archive in the format of initial ramdisks (newc)."""
    out = io.BytesIO()

    def add(number: int, name: str, mode: int, content: bytes) -> None:
        fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0)
        out.write(b"070701" + b"".join(b"%08X" % field for field in fields))
        for part in (name.encode() + b"\0", content):
            out.write(part)
            out.write(bytes(-out.tell() % 4))

    entries = [(name, stat.S_IFDIR | 0o755, b"") for name in folders]
    entries += [(name, stat.S_IFREG | mode, content) for name, (mode, content) in files.items()]
    for number, (name, mode, content) in enumerate(entries, start=1):
        add(number, name, mode, content)
    add(0, "TRAILER!!!", 0, b"")
    return out.getvalue()
