import pytest
import torch

from executor.errors import DeviceError
from executor.estimating.counting import Kind, Operator, Stage
from executor.estimating.gpus import GPUS, known_gpu
from executor.estimating.roofline import Efficiency, Roofline

ROOFLINE = Roofline(
    flops=1e12,
    bandwidth=1e9,
    arithmetic={Kind.MATMUL: Efficiency(best=0.5, half=1e9)},
    traffic=dict.fromkeys(Kind, Efficiency(best=0.8)),
    operator_s={Stage.FORWARD: 1e-3, Stage.RECORDING: 2e-3, Stage.BACKWARD: 4e-3},
    task_s={Stage.FORWARD: 0.1, Stage.RECORDING: 0.2, Stage.BACKWARD: 0.4},
)


def test_an_operator_takes_as_long_as_its_arithmetic_or_its_traffic() -> None:
    busy = Operator("mm", Kind.MATMUL, Stage.FORWARD, flops=4 * 10**9, bytes=8 * 10**5)
    assert ROOFLINE.operator_seconds(busy) == pytest.approx(1e-3 + (4e9 + 1e9) / 0.5e12)
    moving = Operator("mm", Kind.MATMUL, Stage.BACKWARD, flops=4 * 10**9, bytes=8 * 10**7)
    assert ROOFLINE.operator_seconds(moving) == pytest.approx(4e-3 + 8e7 / 0.8e9)


def test_kinds_without_an_efficiency_of_arithmetic_are_limited_by_memory() -> None:
    operator = Operator("softmax", Kind.REDUCTION, Stage.RECORDING, flops=10**15, bytes=8 * 10**5)
    assert ROOFLINE.operator_seconds(operator) == pytest.approx(2e-3 + 1e-3)


def test_work_takes_the_time_of_its_operators_and_of_the_stages_that_it_goes_through() -> None:
    nothing = [Operator("add", Kind.ELEMENTWISE, stage, 0, 0) for stage in (Stage.RECORDING, Stage.BACKWARD)]
    assert ROOFLINE.seconds(nothing) == pytest.approx(0.2 + 2e-3 + 0.4 + 4e-3)
    assert ROOFLINE.seconds([]) == 0


def test_the_clock_counts_what_work_runs() -> None:
    x = torch.empty(1000, 1000, device="meta")
    with torch.no_grad():
        assert ROOFLINE.clock(lambda: x @ x) == round(1e9 * (0.1 + 1e-3 + max(3e9 / 0.5e12, 12e6 / 0.8e9)))


@pytest.mark.parametrize("spelling", ["RTX 4090", "rtx-4090", "4090", "rtx_4090"])
def test_gpus_go_by_any_spelling(spelling: str) -> None:
    assert known_gpu(spelling).name == "RTX 4090"


def test_unknown_gpus_and_dtypes_are_one_message() -> None:
    with pytest.raises(DeviceError, match=r"no GPU 'RTX 3080'.*did you mean 'RTX 3090'.*known are GTX 1080 Ti, "):
        known_gpu("RTX 3080")
    with pytest.raises(DeviceError, match="GTX 1080 Ti has no known speed in bfloat16; it has one in float32"):
        known_gpu("1080ti").roofline("bfloat16")


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_every_gpu_has_a_time_for_every_operator_in_each_of_its_dtypes(gpu) -> None:
    assert "float32" in gpu.peaks
    for dtype in gpu.peaks:
        roofline = gpu.roofline(dtype)
        for kind in Kind:
            for stage in Stage:
                assert 0 < roofline.operator_seconds(Operator("any", kind, stage, 10**6, 10**6)) < 1
