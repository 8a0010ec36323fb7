"""One live module that trains, generates and trains again, under tensor parallelism.

If these fail, ranks sample from weights of another update, or a rollout leaves them out of step.
"""

from tests.distributed.whole import of_all_ranks
from tests.support import world
from tests.support.combinations import grid, two_ranks
from tests.support.engine import generating_model
from tests.support.generation import (
    by_dynamic_context,
    by_forwards,
    by_static_context,
    prompts_of,
)
from tests.support.models import MIXED
from tests.support.training import Training, differing

pytestmark = two_ranks

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
PROMPTS = prompts_of((5, 9, 7))

every_way = grid(
    1,
    {
        "sequence_parallel": {"tp": False, "sp": True},
        "generated": {"static": by_static_context, "dynamic": by_dynamic_context},
    },
)


def live_model(sequence_parallel: bool, **changes):
    return generating_model(sequence_parallel=sequence_parallel and world.tp_size() > 1, **changes)


def evaluated(generated, model):
    """Generate as a rollout does; every rank has the same."""
    model.eval()
    texts = generated(model, PROMPTS, 4)
    assert of_all_ranks(texts) == [texts] * world.size()
    return texts


@every_way
def test_training_goes_on_as_if_nothing_had_been_generated(sequence_parallel, generated):
    # Megatron trains mixtures of experts under TP only with sequence parallelism.
    changes = MIXED if sequence_parallel else DROPOUT
    through = Training(live_model(sequence_parallel, **changes))
    expected = through.steps(4)
    training = Training(live_model(sequence_parallel, **changes))
    losses = training.steps(2)
    evaluated(generated, training.model)
    losses += training.steps(2)
    assert losses == expected
    assert not differing(training.state(), through.state())


@every_way
def test_the_next_token_sees_the_update(sequence_parallel, generated):
    training = Training(live_model(sequence_parallel))
    before = evaluated(generated, training.model)
    training.steps(1)
    after = evaluated(generated, training.model)
    fresh = live_model(sequence_parallel, seed=3)
    old = evaluated(generated, fresh)
    fresh.load_state_dict(training.model.state_dict())
    assert after == evaluated(generated, fresh)
    assert after not in (before, old)
    # And it is what the model says without any cache.
    whole = evaluated(by_forwards, training.model)
    assert [text.tokens for text in after] == [text.tokens for text in whole]
