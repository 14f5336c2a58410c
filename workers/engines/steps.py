"""How many tokens an engine computes in its next step.

A step is the gap between two tokens of every reply that the engine writes, and a long prompt makes it long. Where nobody reads,
nothing is gained by a short one: each step has its price, and the prompt takes more of them. So a step is as long as the engine
can make it while no reply is being written, and has room for little of a prompt while one is.
"""


def step_tokens(most: int, beside_replies: int, writing: int) -> int:
    """Tokens of a step, where `writing` are those that replies need in it.

    `most` is the engine's bound, and `beside_replies` the operator's for prompts beside them; 0 sets none.
    """
    if not writing or not beside_replies:
        return most
    return min(most, writing + beside_replies)
