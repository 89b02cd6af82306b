"""What becomes of a pager's decisions: tasks, buffers, and the order of copies from and to the home tensors."""

from sim.builders.draft import Draft
from sim.builders.paged_tasks import PagedGpu, play_together
from sim.builders.paging import PagedStep, Pager, Tensor
from sim.plan import Residency, Writeback
from sim.schedule import TaskKind, TensorKind


def played(*steps: PagedStep, writeback: Writeback = Writeback.DROP) -> Draft:
    draft = Draft()
    play_together(draft, [PagedGpu(draft, 0, Pager(0, 1000, Residency.NONE, writeback), steps)])
    return draft


def kinds(draft: Draft) -> list[TaskKind]:
    return [entry.kind for entry in draft.entries]


IN, OUT, WORK = TaskKind.SWAP_IN, TaskKind.SWAP_OUT, TaskKind.FORWARD


def test_a_home_tensor_comes_in_after_its_latest_copy_out_and_goes_out_after_the_copies_that_read_it():
    """Tied weights are one home tensor, whichever layer's copy moves."""
    mine, tied = (Tensor(kind=TensorKind.WEIGHT, layer=layer, bytes=8, home=0) for layer in (0, 1))
    other = Tensor(kind=TensorKind.WEIGHT, layer=2, bytes=8, home=2)
    draft = played(
        PagedStep(kind=WORK, layer=1, touches=(tied,)),
        PagedStep(kind=WORK, layer=0, touches=(mine,), changes=(mine,)),
        PagedStep(kind=WORK, layer=2, touches=(other,)),
        PagedStep(kind=WORK, layer=1, touches=(tied,)),
    )
    assert kinds(draft) == [IN, WORK, IN, WORK, OUT, IN, WORK, IN, WORK]
    first_in, mine_in, out, other_in, last_in = (draft.entries[at] for at in (0, 2, 4, 5, 7))
    assert [sorted(entry.after) for entry in (first_in, mine_in, other_in)] == [[], [], []]
    assert sorted(out.after) == [2]  # in its lane after 0 too
    assert sorted(last_in.after) == [4]
    assert not first_in.reads
    assert not out.writes


def test_a_tensor_without_a_home_goes_to_one_host_buffer_and_comes_back_from_it():
    stash = Tensor(kind=TensorKind.STASH, layer=1, bytes=8, samples=(2, 4), microbatch=1)
    draft = played(
        PagedStep(kind=WORK, layer=0, touches=(stash,), creates=(stash,)),
        PagedStep(kind=WORK, layer=1, touches=(stash,)),
        PagedStep(kind=WORK, layer=1, touches=(stash,), dies=(stash,)),
        writeback=Writeback.ALWAYS,
    )
    assert kinds(draft) == [WORK, OUT, IN, WORK, OUT, IN, WORK]
    (host,) = [buffer for buffer in draft.buffers if buffer.gpu is None]
    assert [draft.entries[at].writes for at in (1, 4)] == [(host.id,)] * 2
    assert [draft.entries[at].reads for at in (2, 5)] == [(host.id,)] * 2
    assert (host.kind, host.layer_first, host.bytes, host.samples) == (TensorKind.STASH, 1, 8, (2, 4))
    assert {(entry.samples, entry.microbatch, entry.bytes) for entry in draft.entries if entry.kind is OUT} == {
        ((2, 4), 1, 8)
    }
    # Three stays on the GPU, three buffers.
    assert len(draft.buffers) == 4


def test_a_step_reads_what_was_there_and_writes_what_it_changes_creates_and_its_workspace():
    weight = Tensor(kind=TensorKind.WEIGHT, layer=0, bytes=8, home=0)
    buffer = Tensor(kind=TensorKind.BUFFER, layer=0, bytes=4, home=1)
    made = Tensor(kind=TensorKind.STASH, layer=1, bytes=2)
    touches = (weight, buffer, made)
    step = PagedStep(kind=WORK, layer=0, touches=touches, creates=(made,), changes=(buffer,), workspace_bytes=5)
    draft = played(step)
    work = next(entry for entry in draft.entries if entry.kind is WORK)
    assert [draft.buffers[at].kind for at in work.reads] == [TensorKind.WEIGHT, TensorKind.BUFFER]
    assert [draft.buffers[at].kind for at in work.writes] == [TensorKind.BUFFER, TensorKind.STASH, TensorKind.WORKSPACE]
    assert draft.buffers[work.writes[-1]].bytes == 5
