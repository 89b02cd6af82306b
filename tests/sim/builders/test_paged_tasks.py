"""What becomes of a pager's decisions: tasks, buffers, and the order of copies from and to the home tensors."""

from collections.abc import Sequence

import pytest

from sim.builders.draft import Draft
from sim.builders.paged_tasks import PagedGpu, StoreOrder, play_together
from sim.builders.paging import Event, Home, PagedStep, Pager, Tensor
from sim.errors import DoesNotFit
from sim.plan import Residency, Writeback
from sim.schedule import TaskKind, TensorKind


def played(*steps: PagedStep, writeback: Writeback = Writeback.DROP) -> Draft:
    """On one GPU."""
    return played_together([steps], writeback=writeback)


def played_together(
    steps: Sequence[Sequence[PagedStep]], *, cap: int = 1000, writeback: Writeback = Writeback.DROP
) -> Draft:
    """On GPUs that share a store."""
    draft, store, sent = Draft(), StoreOrder(), {}
    pagers = [Pager(gpu, cap, Residency.NONE, writeback) for gpu in range(len(steps))]
    gpus = [PagedGpu(draft, gpu, pagers[gpu], each, store, sent) for gpu, each in enumerate(steps)]
    play_together(draft, gpus)
    return draft


def names(draft: Draft) -> list[str]:
    return [f"{entry.gpu}: {entry.kind.value} {entry.layers[0]}" for entry in draft.entries]


def kinds(draft: Draft) -> list[TaskKind]:
    return [entry.kind for entry in draft.entries]


IN, OUT, WORK = TaskKind.SWAP_IN, TaskKind.SWAP_OUT, TaskKind.FORWARD


def test_a_home_tensor_comes_in_after_its_latest_copy_out_and_goes_out_after_the_copies_that_read_it():
    """Tied weights are one home tensor, whichever layer's copy moves."""
    mine, tied = (
        Tensor(kind=TensorKind.WEIGHT, layer=layer, bytes=8, home=Home(TensorKind.WEIGHT, 0)) for layer in (0, 1)
    )
    other = Tensor(kind=TensorKind.WEIGHT, layer=2, bytes=8, home=Home(TensorKind.WEIGHT, 2))
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
    weight = Tensor(kind=TensorKind.WEIGHT, layer=0, bytes=8, home=Home(TensorKind.WEIGHT, 0))
    buffer = Tensor(kind=TensorKind.BUFFER, layer=0, bytes=4, home=Home(TensorKind.BUFFER, 0))
    made = Tensor(kind=TensorKind.STASH, layer=1, bytes=2)
    touches = (weight, buffer, made)
    step = PagedStep(kind=WORK, layer=0, touches=touches, creates=(made,), changes=(buffer,), workspace_bytes=5)
    draft = played(step)
    work = next(entry for entry in draft.entries if entry.kind is WORK)
    assert [draft.buffers[at].kind for at in work.reads] == [TensorKind.WEIGHT, TensorKind.BUFFER]
    assert [draft.buffers[at].kind for at in work.writes] == [TensorKind.BUFFER, TensorKind.STASH, TensorKind.WORKSPACE]
    assert draft.buffers[work.writes[-1]].bytes == 5


class TestPassing:
    """GPU 0 makes x of two microbatches, GPU 1 takes them."""

    def ends(self, microbatch: int) -> tuple[PagedStep, PagedStep]:
        passage = Event("x", 1, microbatch)
        out, x = (
            Tensor(kind=kind, layer=1, bytes=8, passage=passage, samples=(microbatch, microbatch + 1))
            for kind in (TensorKind.ACTIVATION, TensorKind.STASH)
        )
        sender = PagedStep(kind=WORK, layer=0, touches=(out,), creates=(out,), sends=out)
        return sender, PagedStep(kind=WORK, layer=1, touches=(x,), dies=(x,), receives=x)

    def test_a_copy_joins_the_two_ends_right_before_the_receiver(self):
        (first, take_first), (second, take_second) = self.ends(0), self.ends(1)
        draft = played_together([[first, second], [take_first, take_second]])
        assert names(draft) == [
            "0: forward 0",
            "0: forward 0",
            "0: p2p 1",
            "1: forward 1",
            "0: p2p 1",
            "1: forward 1",
        ]
        copies = [entry for entry in draft.entries if entry.kind is TaskKind.P2P]
        assert [(copy.peer, copy.bytes, copy.samples) for copy in copies] == [(1, 8, (0, 1)), (1, 8, (1, 2))]
        for copy, made, taken in ((copies[0], 0, 3), (copies[1], 1, 5)):
            assert copy.tensor_kind is TensorKind.ACTIVATION
            assert copy.reads == draft.entries[made].writes
            assert copy.writes == draft.entries[taken].reads

    def test_a_gpu_without_room_waits_until_the_receiver_has_taken_what_it_sent(self):
        (first, take_first), (second, take_second) = self.ends(0), self.ends(1)
        draft = played_together([[first, second], [take_first, take_second]], cap=15)
        assert names(draft) == [
            "0: forward 0",
            "0: p2p 1",
            "1: forward 1",
            "0: forward 0",
            "0: p2p 1",
            "1: forward 1",
        ]

    def test_a_step_for_which_nobody_makes_room_is_refused(self):
        """GPU 1 wants the second x first, which GPU 0 cannot make beside the first one."""
        (first, take_first), (second, take_second) = self.ends(0), self.ends(1)
        with pytest.raises(DoesNotFit, match="8 B that wait to be sent to other GPUs") as refusal:
            played_together([[first, second], [take_second, take_first]], cap=15)
        assert (refusal.value.gpu, refusal.value.needed, refusal.value.cap) == (0, 16, 15)


def test_gpus_that_share_a_store_take_each_others_copies_from_it_in_order():
    """GPU 1's gradient goes home and comes in on GPU 0, whose weight then comes in on GPU 1."""
    gradient, weight = Home(TensorKind.GRADIENT, 1), Home(TensorKind.WEIGHT, 0)
    theirs, mine = (Tensor(kind=TensorKind.GRADIENT, layer=1, bytes=8, home=gradient) for _ in range(2))
    updated, taken = (Tensor(kind=TensorKind.WEIGHT, layer=layer, bytes=8, home=weight) for layer in (0, 1))
    there, changed = Event("gradient", 1), Event("weight", 0)
    owner = PagedStep(
        kind=TaskKind.UPDATE,
        layer=0,
        touches=(updated, mine),
        changes=(updated,),
        dies=(mine,),
        awaits=(there,),
        signals=(changed,),
    )
    user = [
        PagedStep(kind=WORK, layer=1, touches=(theirs,), creates=(theirs,), goes_out=(theirs,), signals=(there,)),
        PagedStep(kind=WORK, layer=2, touches=(taken,), awaits=(changed,)),
    ]
    draft = played_together([[owner], user])
    assert names(draft) == [
        "1: forward 1",
        "1: swap_out 1",
        "0: swap_in 0",
        "0: swap_in 1",
        "0: update 0",
        "0: swap_out 0",
        "1: swap_in 1",
        "1: forward 2",
    ]
    assert 1 in draft.entries[3].after
    assert 5 in draft.entries[6].after


def test_the_step_that_needs_most_is_refused_before_anything_is_played():
    small, large = (Tensor(kind=TensorKind.WEIGHT, layer=layer, bytes=size) for layer, size in ((0, 20), (1, 30)))
    with pytest.raises(DoesNotFit) as refusal:
        played_together([[PagedStep(kind=WORK, layer=t.layer, touches=(t,)) for t in (small, large)]], cap=15)
    assert (refusal.value.layers, refusal.value.needed) == ((1, 1), 30)
