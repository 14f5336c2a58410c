"""Every bound of the pipeline, with its reason. A bound that operators tune is in `config.py`; these hold the design together."""

from typing import Final

ACK_WAIT_S: Final = 1.0
"""Lease of a delivered message, as in `configs/jetstream`. A dead worker's message comes back this long after its last `+WPI`."""

LEASE_PERIOD_S: Final = 0.3
"""A holder renews three times within `ACK_WAIT_S`: two renewals may be lost."""

LEASE_SILENT_MAX_S: Final = 0.8 * ACK_WAIT_S
"""A holder whom the broker has not answered for this long fences itself: its message may already be with another."""

REPEAT_PERIOD_S: Final = 0.2
"""Claims and asks are repeated with the same id until answered: a lost message costs one period."""

ASK_SILENT_MAX_S: Final = 0.6
"""Three periods without a repeat: the asker is dead; its ask is dropped and its grant expires."""

CLAIM_PATIENCE_S: Final = 3 * REPEAT_PERIOD_S
"""A claim repeated for so long in vain gives its slot away: what waits for the dead keeps none from the living."""

SECOND_ASK_AFTER_S: Final = 0.1
"""An ask that has waited this long tries a second decode worker: half an interactive first token is already gone."""

ASKS_WAITING_MAX: Final = 256
"""Asks a decode worker keeps waiting. Above it, refuse: 256 × 10 ms of service is past any interactive deadline."""

RESERVE_RATIO: Final = 0.10
"""Share of a decode worker's blocks never granted: the source article's threshold for not dispatching."""

UNREAD_MAX: Final = 2
"""Prompts that a decode engine has still to read itself, from which on none goes straight to it: a third would wait behind two,
in an engine, where nobody else can have it, and longer than a prefill worker takes for it."""

GRANTS_PER_SEAT: Final = 1.25
"""Sequences that a decode worker grants for each that its engine runs at once: what is still being prefilled for it holds no
seat yet. More would queue inside the engine, where nobody sees it, instead of in REQUESTS."""

PRESENCE_PERIOD_S: Final = 0.2
"""Every process says this often that it lives, and how it is."""

ACCUSER_PERIOD_S: Final = 0.1
"""A gateway says it more often: it judges others up to when its own word last came back."""

PRESENCE_SILENT_MAX_S: Final = 0.8
"""Four periods without a word: not offered work. (An accusation needs more: see `claims.py`.)"""

ACCUSE_SILENT_S: Final = 0.4
"""Two presence periods without a word or a frame: a worker is taken for dead, by an accuser that trusts itself."""

ASK_BROKER_SILENT_S: Final = 0.75 * PRESENCE_PERIOD_S
"""A worker whose next word is due may be dead: the broker is asked, which knows at once whether anybody listens there."""

ABSENT_RATIO: Final = 1 / 4
"""Of the patience with a worker's silence, as long as nobody may listen there: a lost connection is back sooner. So a death shows
after 0.25 to 0.3 s."""

ACCUSE_SILENT_MAX_S: Final = 1.6
"""Patience with a worker that was accused wrongly, or whose reply would be lost. Beyond `ACK_WAIT_S` the broker has brought the
message back anyway."""

STRAY_OVERDUE_S: Final = 0.1
"""A request that nobody has claimed for so long either waits for a slot, or was delivered to somebody who is dead: its consumer
is asked. A claim takes a few milliseconds."""

STRAY_PATIENCE_S: Final = REPEAT_PERIOD_S
"""What a worker gets to claim what has been delivered to it: one repetition, should its first claim be lost."""

STRAY_ASK_PERIOD_S: Final = 0.1
"""A consumer with overdue requests is asked this often."""

STRAY_ASKS_MAX: Final = 4
"""Consumers that a gateway asks in one look, twenty times a second: where all shards have a backlog it costs the broker 1 % of a
core."""

RECEIVER_SILENT_MAX_S: Final = 2.0
"""Ten periods without a word: a receiver is taken for gone, and its requests are dropped. Longer than any broker's restart."""

STARTS_TIMEOUT_S: Final = 1.0
"""To record a start, or take it back. Unrecorded, the request goes back to the queue."""

SURPLUS_HOLD_S: Final = 0.02
"""A message delivered beyond the free slots waits this long for one before it is given back."""

BACKLOG_UNSERVED_S: Final = 0.02
"""A pull on a shard with backlog is served within a round trip. One that is not, after this long, shows that others took it."""

SPILL_LOAD: Final = 0.85
"""Load above which a worker stops offering slots: the source article's threshold."""

SPILL_BACK_LOAD: Final = 0.75
"""Load at which a worker that has spilled takes work again: three of four slots, so a single end of a request shows."""

WORKERS_SCORED_MAX: Final = 4096
"""Workers whose scores for all shards are remembered, at 2 KB each: four times the largest fleet that we plan for."""

RATES_TRACKED_MAX: Final = 1024
"""Creators that a gateway counts, at 300 bytes each. One that has a thousandth of the traffic is surely among them."""

RATES_TOP_MAX: Final = 256
"""Creators that a balancer looks at, the heaviest: what it could do about lighter ones is less than the noise of a load."""

RATES_MEMORY_S: Final = 20.0
"""A request counts for 1/e after so long: at 1,000/s a worker's quarter of the traffic is known to 1.4 %."""

ROUTE_VARIANTS_MAX: Final = 64
"""Affinities of one creator. A route stays under 400 bytes, and a creator needs more only where it is a fifth of 300 workers."""

ROUTE_CHANGES_MAX: Final = 4
"""Exceptions that one step makes or takes back: each warms up a worker, and its effect is seen before the next ones."""

PULL_RANK_MAX: Final = 9
"""NATS knows the priorities 0 to 9; ranks beyond share the last."""

PREFIXES_MAX: Final = 1024
"""Creators whose shared prefix a prefill worker remembers, for others to warm up: 7 MB of token ids, as a rule."""

PREFIXES_BYTES_MAX: Final = 64 * 1024 * 1024
"""All of them, where prompts are long: of a creator with one prompt, that prompt is all that is known."""

PREFIX_TOKENS_MAX: Final = 65_536
"""Of one: longer than any persona (`PERSONA_BYTES_MAX`), and a quarter of what a message of the broker carries."""

WARM_UPS_WAITING_MAX: Final = 8
"""Prefixes that wait to be warmed up: a second of cold prefills. Beyond it the asker publishes the route all the same."""

WARM_UP_TIMEOUT_S: Final = 2.0
"""What a gateway waits for a prefix to be loaded before it sends requests there anyway."""

BALANCE_PERIOD_S: Final = 1.0
"""Between two looks at who is asked for how much, by the gateway that writes routes."""

ROUTES_RELOAD_S: Final = 10.0
"""Between two looks at the whole bucket of routes, for a change that was not heard of."""

SETTINGS_RELOAD_S: Final = 10.0
"""Between two looks at the bucket of live settings, for a change that was not heard of."""

SETTINGS_AGAIN_S: Final = 0.5
"""After a change was heard: a second look, since followers may hear of a write before it is stored."""

RATES_SAID_MAX: Final = 32
"""Creators whose rates a gateway's presence names: 1 KB, five times a second. Who asks less is no exception to the hash."""

EARLY_MAX: Final = 512
"""Numbered things kept while one before them is missing: of those beyond, the latest go, and are asked for again."""

CACHE_GAP_PATIENCE_S: Final = 0.02
"""A batch of cache events that others have overtaken comes within this time; after it, it is taken for lost, and repeated."""

CACHE_CHECK_PERIOD_S: Final = 0.4
"""How often an engine is asked for cache events that we may have missed: the last of them may be lost, and no later one shows it.
With the 0.2 s that its answer takes, what we know of its cache is right again within a second."""

CACHE_REPLAY_PERIOD_S: Final = 0.2
"""An unanswered wish for a replay is repeated this often."""

CACHE_REPLAY_TIMEOUT_S: Final = 1.0
"""What an engine gets to repeat its batches. vLLM looks for wishes ten times a second, and sends 2,048 batches in 0.1 s."""

CACHE_BATCHES_KEPT: Final = 2048
"""Batches that an engine keeps to be repeated, one a step: 40 s of a busy GPU, and 70 MB at the very most. What is late by
more makes the index begin anew."""

CACHE_BATCHES_UNREAD: Final = 1024
"""Batches between the engine and us. Beyond it they are dropped, and repeated once we read again: half of what it keeps."""

WARM_CREATORS_MAX: Final = 1024
"""Creators of whom a prefill worker says whether they are warm: twice as many prefixes of 1,800 tokens as an H200 holds of an
8B model. A snapshot of them is 8 KB."""

WARM_TELL_PERIOD_S: Final = 0.05
"""Who has become warm or cold is said this often: an eviction costs one message for all creators that it hit."""

WARM_SNAPSHOT_PERIOD_S: Final = 5.0
"""All warm creators are said this often, asked or not. The digest in presence finds a wrong view 25 times as fast."""

WARM_SNAPSHOT_SPARE_S: Final = 0.1
"""Between two snapshots that are asked for: one answers all gateways that have started together."""

WARM_ASK_PERIOD_S: Final = 0.2
"""A gateway whose view of a worker is wrong asks this often: once a presence."""

TURNED_AWAY_MAX: Final = 16_384
"""Requests of silent receivers that a worker remembers to have seen: all that eight gateways have in flight."""

TOMBSTONES_MAX: Final = 4096
"""Cancelled request ids a worker remembers: at 1,000 req/s and 1 % cancels, several minutes of them."""

CREATOR_TOKEN_BYTES_MAX: Final = 64
"""A longer id becomes its hash: subjects stay short, and NATS advises at most 256 bytes in all."""

REQUEST_ID_BYTES_MAX: Final = 128
"""Request ids are one subject token and a log field."""

KEYS_MAX: Final = 1024
"""Bearer keys of a gateway. Each request is compared with all of them, so that no time tells which came close: 40 µs at most."""

KEYS_SAID_MAX: Final = 64
"""Keys whose use a gateway's presence names, the busiest: 2 KB, ten times a second. Others' use of the rest is not seen."""

KEYS_RELOAD_S: Final = 1.0
"""Between two looks at the file of the keys: a key that is taken out is refused a second later."""

KEY_BURST_S: Final = 1.0
"""A key that has been silent may ask at once for what its rate gives in so long, and for one request at least."""

KEY_RATE_MEMORY_S: Final = 2.0
"""How long a request counts in what a gateway says of a key's rate: 20 presences, so that others know of a jump as it happens."""

HEAD_TIMEOUT_S: Final = 10.0
"""For a request's head to come, and for the rest of a body that is not read any more. Any client's head is one packet."""

HEAD_BYTES_MAX: Final = 65_536
"""A request's line and headers: eight times what common proxies take. Nothing else would bound them."""

TRACE_STATE_BYTES_MAX: Final = 512
"""What W3C asks everybody to carry of a `tracestate`. A longer one is left out, as it says."""

MESSAGE_BYTES_MAX: Final = 1_000_000
"""Payload and headers of one NATS message. The server's own limit is 1 MiB, and passing it closes the connection for good."""

COMPLETION_PROMPTS_MAX: Final = 16
"""Prompts of one HTTP request. Each is a request of the pipeline and in flight at once; a creator's queue takes 256."""

COMPLETION_BYTES_MAX: Final = 2 * MESSAGE_BYTES_MAX
"""Those requests together: twice what is counted of them, the body. All else that it says is in each, and held as often."""

PROMPT_ENTRIES_MAX: Final = 8192
"""Logprobs of a prompt in one reply, at 70 bytes each: with the reply itself they must fit `MESSAGE_BYTES_MAX`."""

HANDOFF_PATIENCE_S: Final = 5.0
"""A handoff is repeated every `REPEAT_PERIOD_S`, since accepting is idempotent, while its decode worker lives: it may be waiting
for a receiver that is slow. Not for longer than a receiver is waited for, and a broker's restart."""

LETTER_TIMEOUT_S: Final = 1.0
"""To store a dead letter. Unstored, the message comes again."""

DELIVERIES_MAX: Final = 1000
"""`max_deliver` of the consumers. Deliveries are not failures: a pull that dies with its worker counts as one."""

ORDERS_WAITING_MAX: Final = 16
"""Orders that wait for a worker to obey the one before: operators are few. Beyond it they go unanswered."""

DRAIN_S: Final = 20.0
"""A worker that is told to stop gives its running requests this long, then lets go of them."""

LEASE_SPARE_S: Final = 2.0
"""A lease is kept this long beyond the time in which a request's end is told, for its ack. Then its holder is stuck."""

HOME_ANSWERS_S: Final = 0.02
"""A worker for both waits so long for its own word on whether a reply stays: an ask and its answer take 1 to 2 ms."""

LOOP_BEAT_S: Final = 0.25
"""A worker's loop says this often, to the thread that keeps its leases, that it turns."""

LOOP_SILENT_MAX_S: Final = 5.0
"""A loop that has not turned for this long is taken for dead, and its leases lapse. No work of ours blocks it for a second."""

EXPIRED_AFTER_S: Final = 10.0
"""From a request's deadline until the DLQ keeper takes it for dead, and whoever waits for its conversation, too. A worker tells
the end for 5 s and keeps its lease for `LEASE_SPARE_S` and one `ack_wait` more; and it is well under the 30 s between the longest
deadline and a stream's `max_age`."""

SCAN_PERIOD_S: Final = 2.0
"""Between two scans of a REQUESTS stream for what has aged out."""

SCAN_READS_MAX: Final = 2000
"""Messages that a scan reads, at 0.2 ms each. What a healthy fleet serves within `EXPIRED_AFTER_S` is never read."""

AGES_MAX: Final = 200_000
"""Messages a scan remembers the deadlines of: all that a REQUESTS stream may hold, at 100 bytes each."""

KEEPER_ITEMS_MAX: Final = 64
"""Dead requests that a keeper deals with at a time: each waits for its receiver, and may be of 1 MB."""

KEEPER_ITEM_S: Final = 8.0
"""What a keeper gives one item before it gives it back: under the item's `ack_wait` of 10 s, so that no two keepers have it."""

KEEPER_ANSWER_S: Final = 1.5
"""What a receiver gets to answer a keeper's claim or error frame: seven repetitions."""

KEEPER_RETRY_S: Final = 2.0
"""Before an item is tried again: nobody has answered, or the broker was away."""

KEEPER_TRIES_MAX: Final = 50
"""Tries of one item, ten in the worst minute. Then something about it is broken, and only `max_age` ends it."""

PERSONA_BYTES_MAX: Final = 262_144
"""A persona: some 60,000 tokens, half of the longest context that we plan for, and 16 versions of it are kept."""

PERSONAS_CACHED_MAX: Final = 1024
"""Versions of personas that a prefill worker keeps: as many creators as it remembers prefixes of, 8 KB each, as a rule."""

PERSONAS_RELOAD_S: Final = 10.0
"""Between two looks at the bucket of personas, for a change that was not heard of."""

PERSONAS_WARMING_MAX: Final = 256
"""New personas that wait until their owner has time to prefill them. Beyond it the first request does."""

PERSONA_WARM_PERIOD_S: Final = 0.5
"""Before a persona is tried again for which its owner had no time."""

PERSONA_WARM_TRIES_MAX: Final = 120
"""Tries of one persona, a minute of them: by then its requests have come, or will find a worker that is overloaded anyway."""

REFERENCE_CHARS_MAX: Final = 512
"""Characters of the id of a creator or a conversation: OpenAI's bound for a value of `metadata`."""

REFERENCE_MESSAGE_BYTES_MAX: Final = 131_072
"""A message by reference, which is kept as history: with its reply it must fit into one message of the broker."""

HISTORY_BYTES_MAX: Final = 1_000_000
"""All turns of a prompt: what sends everything may not have more either."""

TURNS_KEPT_MAX: Final = 64
"""`max_msgs_per_subject` of TURNS and of SENT: the window and a step of it, and what an operator may raise them to."""

SLOT_BYTES_MAX: Final = 900_000
"""A slot with its finished reply, which leaves room for the line in a message of the broker. A longer reply is not kept ahead."""

TURNS_TIMEOUT_S: Final = 2.0
"""To write an exchange down, or to read a history. Beyond it the message is let go, and comes again."""

CONVERSATION_WAIT_S: Final = 0.05
"""A message whose conversation is worked on stays away for so long, and for twice as long each further time …"""

CONVERSATION_WAIT_MAX_S: Final = 1.0
"""… up to this: 60 deliveries of an interactive request at most, 600 of a batch request, of `DELIVERIES_MAX`."""

CONVERSATION_RESERVED_S: Final = CONVERSATION_WAIT_MAX_S + 0.5
"""A conversation that is left is kept for the first who waits: the longest wait, and time to be delivered."""

CONVERSATION_LINE_MAX: Final = 32
"""Messages that wait for a conversation in order, at 60 bytes each. People do not type faster."""

CONVERSATION_TRIES_MAX: Final = 16
"""Compare-and-sets of one change of a slot: each that fails means that another one has succeeded."""

RECORDERS_MAX: Final = 4
"""Recorders of traffic that a worker listens to at a time: each costs it a hash over every prompt."""

RECORDER_PERIOD_S: Final = 1.0
"""A recorder repeats its wish this often."""

RECORDER_SILENT_MAX_S: Final = 3.0
"""Without a repeat for so long, nobody is told any more."""

TRACE_REORDER_S: Final = 60.0
"""A line of a trace is held until requests that are younger by this have ended: longer than an interactive reply takes."""

TRACE_LINES_HELD_MAX: Final = 100_000
"""Lines held for that, at 400 bytes each: a minute of 1,600 requests a second."""

TRACE_BLOCKS_KNOWN_MAX: Final = 1_000_000
"""Blocks that a recording can tell are there again, at 150 bytes each: of those beyond, the ones not seen for longest go."""

TRACE_LINES_MAX: Final = 1_000_000
"""Lines of a trace that is replayed, all of which are held: a gigabyte, where prompts are as long as in Mooncake's own."""
