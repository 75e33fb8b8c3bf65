"""The policy's loss, and the figures reported beside it: pure functions of per-token log-probabilities.

Each token has three log-probabilities, and a fourth if there is a reference:
    sampler     recorded by the engine that sampled the token, possibly under an older version
    proximal    the trainer's, recomputed at the start of the step (phase `logprob`), without gradient
    policy      the trainer's, with gradient; equal to proximal in the first update of a step
    reference   a frozen policy's, without gradient

    objectives.py    the clipped surrogate of policy over proximal (or over sampler)
    corrections.py   weights and masks from proximal over sampler, for tokens of an older policy or another engine
    divergence.py    policy against reference, sampler against trainer, effective sample size
    policy_loss.py   all of these for one micro-batch, as its share of the batch's loss
    sequences.py     sums and means over the tokens of a rollout, in a fixed order

Invariant: everything is a sum over tokens, and all tokens of a rollout are in one micro-batch. The batch's loss is
therefore the exact sum over micro-batches and data parallel ranks. docs/losses.md has the formulas with their sources.
The Megatron backend's `policy_step.py` calls this.

Shapes: T sampled tokens of a micro-batch, one rollout after another; S its rollouts. sequence_T: the number of each
token's rollout, from 0.
"""
