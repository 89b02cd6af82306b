import threading

import pytest
import torch
from torch import nn

from executor.running.storage import StorageTracker, measure_memory

torch.set_num_threads(1)

K = 1024  # floats of the tensors below; a tensor is 4 K bytes
UNIT = 4 * K


def test_counts_what_is_created_and_forgets_what_dies():
    with StorageTracker() as memory:
        a = torch.ones(K)
        b = a + 1
        assert memory.live_bytes == 2 * UNIT
        del a
        assert (memory.live_bytes, memory.peak_bytes) == (UNIT, 2 * UNIT)
        del b
        assert (memory.live_bytes, memory.peak_bytes) == (0, 2 * UNIT)


def test_what_existed_before_does_not_count():
    arena, inputs = torch.zeros(4 * K), torch.ones(K)
    with StorageTracker() as memory:
        arena[:K].copy_(inputs)
        view = arena[K : 2 * K]
        view += 1
        torch.add(inputs, 1, out=arena[2 * K : 3 * K])
        assert (memory.live_bytes, memory.peak_bytes) == (0, 0)


def test_views_and_in_place_operators_add_nothing():
    with StorageTracker() as memory:
        a = torch.ones(K)
        views = [a.view(2, -1), a[: K // 2], a.view(2, -1).t(), a.detach()]
        a.mul_(2).add_(1)
        assert memory.peak_bytes == UNIT
        del a
        assert memory.live_bytes == UNIT  # the views hold it
        del views
        assert memory.live_bytes == 0


def test_tensors_made_from_python_values_count():
    with StorageTracker() as memory:
        held = torch.tensor([1.0, 2.0])
        assert memory.live_bytes == 8
        held += 1
        assert memory.live_bytes == 8


def test_several_results_count_each():
    with StorageTracker() as memory:
        held = torch.ones(K).sort()
        assert memory.live_bytes == UNIT + 2 * UNIT  # values, and indices of twice the size
        del held


def test_a_resized_storage_counts_its_present_size():
    with StorageTracker() as memory:
        a = torch.ones(K)
        a.resize_(3 * K)
        assert (memory.live_bytes, memory.peak_bytes) == (3 * UNIT, 3 * UNIT)


def test_reset_starts_a_new_peak_at_what_is_alive():
    with StorageTracker() as memory:
        a = torch.ones(K)
        b = torch.ones(3 * K)
        del b
        memory.reset_peak()
        assert memory.peak_bytes == UNIT
        c = a + 1
        assert memory.peak_bytes == 2 * UNIT
        del c


def test_may_be_read_after_the_context():
    with StorageTracker() as memory:
        a = torch.ones(K)
    assert memory.live_bytes == UNIT
    del a
    assert memory.live_bytes == 0


def test_what_another_thread_lets_go_is_forgotten():
    with StorageTracker() as memory:
        held = [torch.ones(K)]
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
        assert memory.live_bytes == 0


def test_reused_addresses_are_not_mistaken():
    with StorageTracker() as memory:
        for _ in range(50):
            a = torch.ones(K)
            assert memory.live_bytes == UNIT
            del a
        assert (memory.live_bytes, memory.peak_bytes) == (0, UNIT)


def test_saved_tensors_live_until_backward_has_used_them():
    x = torch.ones(K, requires_grad=True)
    with StorageTracker() as memory:
        y = x.exp()  # saves its output
        z = y.sin()  # saves its input, which is y
        del y
        assert memory.live_bytes == 2 * UNIT
        (gradient,) = torch.autograd.grad(z, x, torch.ones(K))
        # Backward of sin: z, y, the incoming gradient, cos(y) and their product.
        assert memory.peak_bytes == 5 * UNIT
        del z
        assert memory.live_bytes == UNIT
        del gradient
        assert memory.live_bytes == 0


def test_backward_of_a_linear_layer():
    layer = nn.Linear(64, 32)
    x = torch.ones(16, 64, requires_grad=True)
    with StorageTracker() as memory:
        y = layer(x)
        assert memory.live_bytes == 4 * 16 * 32  # its input is outside, and it saves nothing else
        gradients = torch.autograd.grad(y, [x, layer.weight, layer.bias], torch.ones_like(y))
        del y
        assert memory.live_bytes == 4 * (16 * 64 + 64 * 32 + 32)
        del gradients


def test_accumulated_parameter_gradients_stay():
    layer = nn.Linear(64, 32)
    with StorageTracker() as memory:
        layer(torch.ones(16, 64)).sum().backward()
        assert memory.live_bytes == layer.weight.nbytes + layer.bias.nbytes


def test_the_cpu_is_metered_by_storages():
    with measure_memory(torch.device("cpu")) as memory:
        a = torch.ones(K)
        assert memory.live_bytes == a.nbytes


@pytest.mark.gpu
def test_cuda_is_metered_by_its_allocator():
    device = torch.device("cuda")
    outside = torch.ones(K, device=device)
    with measure_memory(device) as memory:
        a = outside + 1
        b = a + 1
        del a
        assert (memory.live_bytes, memory.peak_bytes) == (UNIT, 2 * UNIT)
        del b
        memory.reset_peak()
        assert (memory.live_bytes, memory.peak_bytes) == (0, 0)
