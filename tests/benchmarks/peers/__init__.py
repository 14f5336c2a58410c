"""Headrace beside its peers, on one machine, in one run: `python -m tests.benchmarks.peers --engines simulated|real`.

Each repetition starts every side in turn, from another one on each time, puts the same requests at the same times on it with
the client of `headrace bench`, and ends it. Figures are compared within a repetition; printed are medians, and the least and
the most.

**Simulated engines: what the hop costs.** All engines take no time for a prompt and write a token every 4 ms, each a piece of its
own; prompts have 2,210 tokens, replies 30. `added` is a first token's time less that of `direct` in the same repetition.

    direct               one engine (`engine.py`) without a router: the floor, and the colocated baseline
    vllm-router          round robin over one such engine: a hop without a split
    vllm-router-pd       a prefill and a decode engine: two HTTP requests one after the other. It keeps nothing: what it has taken
                         is lost with it. Rendering and tokenising it leaves to real engines, so here nobody does either
    dynamo, dynamo-pd    its frontend, which renders, tokenises, detokenises and follows KV events, and one or two of its mockers.
                         They are a simulation of their own: steps are as long, how requests join them is not the same. The client
                         acknowledges each packet at once
    dynamo-pd-late-ack   the same, with a client that acknowledges as Linux does by itself, up to 40 ms late: the frontend sends
                         no second small packet before
    headrace             gateway, broker, keeper, a prefill and a decode worker. Each request is a durable message on disk;
                         workers render, tokenise, detokenise, promise blocks, and keep a reply until it has been received

For Headrace, `beside engines` is a first token's time less what its engines had of it, request by request, as its gateway logs
it: the simulation is a Python program in the worker, whose own work costs time that no real engine would take there.

CPU is told by part: `front` is the process that clients talk to, `beside engines` all that holds no engine (with the broker), and
`all` everything. Work beside the engine that shares a process with it (rendering, credits, the mocker's scheduler) is only in the
last, together with the simulation: the truth for Headrace and for Dynamo lies between the last two.

**Real engines.** SmolLM2-135M on vLLM for CPU; prompts of about 395 tokens in 16 creators' personas of 256, by Zipf's law, and
replies of 24. A reply is good with its first token within 1 s and 99 % of its own gaps within 150 ms; `added` is less the first
token of `vllm-replicas`.

    vllm                 `vllm serve`, one engine with all cores: the colocated baseline
    vllm-replicas        two engines, a core each, behind a cache-aware vllm-router
    vllm-router-pd       a prefill and a decode engine, a core each, over one LMCache server
    headrace-split       a prefill and a decode worker, a core each. As in all that follow, decode begins every reply
                         (`prefill_begins = false`): the SLO counts each gap, and not when tokens come
    headrace-split-prefill-begins
                         as `headrace up` starts them: the first token sooner, and a longer gap behind it
    headrace-both        two workers for both roles, a core each; prompts that lack fewer than 256 tokens go directly to decode
    …-small-steps        the same with at most 32 tokens in a step of an engine, instead of 512: gaps are shorter, prefills longer
    headrace-both-yielding
                         small steps only where a reply is being written, and of 512 tokens otherwise
    headrace-balanced    the same, begun as a prefill and a decode worker, and moved from there by the balancer. All prompts are
                         prefilled: with those that decode reads itself, the split is not the split that it is compared with
    headrace-both-in-time
                         with small steps, and `first_token_s` at the bound of a good reply: what cannot begin by then is
                         refused, and counts as not good. No peer has such a bound

The peers come into virtual environments of their own: `python -m tests.benchmarks.peers.install`. CI runs neither.
"""
