from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from subten.cli import threads
from subten.cli.threads import cpu_quota, suit_threads
from subten.engine import load_model


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What torch is asked for; the environment asks for nothing."""
    counts: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    return counts


def test_a_small_model_is_computed_by_one_thread(asked: list[int]) -> None:
    suit_threads(load_model("demo-moe", device="cpu"))
    assert asked == [1]


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_what_the_environment_says_holds(asked: list[int], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "2")
    suit_threads(load_model("demo-moe", device="cpu"))
    assert asked == []


def test_a_model_on_a_gpu_is_left_alone(asked: list[int]) -> None:
    suit_threads(replace(load_model("demo-moe", device="cpu"), device=torch.device("cuda")))
    assert asked == []


@pytest.mark.parametrize(
    ("quota", "expected"), [(None, []), (2.0, [2]), (1.5, [2]), (0.2, [1]), (8.0, []), (64.0, [])]
)
def test_a_large_model_has_the_threads_that_its_container_may_keep_busy(
    asked: list[int], monkeypatch: pytest.MonkeyPatch, quota: float | None, expected: list[int]
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(threads, "SMALL", 1 << 20)
    monkeypatch.setattr(threads, "cpu_quota", lambda _root: quota)
    suit_threads(load_model("demo-moe", device="cpu"))
    assert asked == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2.5),
        ({"sys/fs/cgroup/cpu.max": "400000 100000\n"}, 4.0),
        (
            {
                "proc/self/cgroup": "0::/a.slice/b.scope\n",
                "sys/fs/cgroup/a.slice/cpu.max": "150000 100000\n",
                "sys/fs/cgroup/a.slice/b.scope/cpu.max": "max 100000\n",
            },
            1.5,
        ),
        (
            {
                "proc/self/cgroup": "3:cpuset:/\n1:cpu,cpuacct:/docker/abc\n0::/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
        (
            {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        ({"proc/self/cgroup": "\n", "sys/fs/cgroup/cpu.max": "\n"}, None),
    ],
)
def test_what_control_groups_allow(tmp_path: Path, files: dict[str, str], expected: float | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu_quota(tmp_path) == expected
