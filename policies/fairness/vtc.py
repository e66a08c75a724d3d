"""The virtual token counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 24, arXiv 2401.00588).

    cost  = w_p * n_p + w_q * n_q
    c_u  += cost / w_u                  when a request of tenant u is sent to an engine
    next  = the oldest request of argmin c_u, over the tenants u that wait in the most urgent class
    c_u   = max(c_u, min c_i - credit)  when u begins to wait: over the tenants i that wait, or if none does, over the
                                        one that waited last
    c_u  += (cost - forecast) / w_u     when the request has ended
    C_k  += cost / class_ratio ** -k    with a class_ratio, for the class k of the request: the class of argmin C_k is
                                        next instead of the most urgent one

    n_p   tokens of the prompt to be computed: less those that the chosen worker has cached
    n_q   output tokens of all choices: a forecast at first, then what was generated
    w_u   the weight of the tenant's API key -> Terms.weight

That is the paper's algorithm 2 with the weights of its section 4.3 and the forecasts of its algorithm 3: by the length
predictor, else the mean of the last five outputs of the tenant, as in the paper,
else the mean of all that ended. A newcomer has no credit.

Deviations: a tenant that waited before keeps up to `credit_tokens` of what it is behind by; in the paper the credit is
0. With 0 a tenant loses what it is behind by whenever nothing of it waits for a moment, and where requests are refused
that would be late, queues are so short that this happens all the time: a tenant that asked for more than its share did
not get all of it (experiment `fairness`). A credit is a burst at most: beyond it, nobody gets more than its share for
having been idle. Counters are kept for each class, because classes go before shares, and twice, at the queue before
prefill and at the pool of computed prompts, because either can be where requests wait. Output is settled at the end
instead of token by token, so a tenant whose forecasts are too short is ahead by their errors in what it has running. In
the pool the decode policy chooses among the entries of all tenants within `slack_tokens` of the least counter; if none
of those fits anywhere, among all. Idle tenants are forgotten, the longest idle first, when there are many
(`shares.MOST_IDLE`).

Classes are strict by default: while something of a more urgent class waits, nothing of another is served. With
`class_ratio` they have counters as tenants have, with the same credit and slack, and what their requests cost counts
for both. The pool then shows the decode policy the entries of one class only, the one whose turn it is, or all of them
if none of these fits anywhere. Priorities beyond `policies.request.classes.MOST_STEPS` weigh as much as this one.

As long as there was only one tenant, everything is as with `none`, but for requests of several choices: such a one
begins as soon as `gang_slots` slots are free, and its other choices get the slots of that worker as they come, where
`none` has it wait for all of them at once. A request that only some workers may serve is passed by while these are
full.

Claimed: the service of two tenants that wait all the time, for each unit of weight, differs by a bounded amount: the
largest cost of a request, `slack_tokens`, `credit_tokens`, and the errors of forecasts of what is running. With
`class_ratio` the same is true of two classes and their weights.
Not claimed: fairness between classes without `class_ratio`; fairness inside an engine, where requests of a batch run
together.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from policies.routing.base import Needs
from policies.routing.params import Number, Whole, check
from policies.state.views import Request


@dataclass(frozen=True, slots=True)
class VirtualTokenCounter:
    """Serves the tenant that got the least tokens for its weight, and so shares a class out by weights."""

    # the paper's values, after the prices of OpenAI's API (section 3.2)
    w_p: Annotated[float, Number(low=0.0, high=1e3)] = 1.0
    """Weight of a token of a prompt."""
    w_q: Annotated[float, Number(above=0.0, high=1e3)] = 2.0
    """Weight of a token of an output."""
    # ASSUMPTION: some requests of a chat; the decode policy then has a choice, and several are placed in one round
    slack_tokens: Annotated[float, Number(low=0.0, unit="tokens")] = 4096.0
    """How far a tenant's counter may be above the least one so that the decode policy sees its pool entries."""
    # some requests of a chat; 8192 and no limit gave the same shares on seeds 300 and 301 of the experiment `fairness`
    credit_tokens: Annotated[float, Number(low=0.0, unit="tokens")] = 8192.0
    """Most tokens, for each unit of weight, that a tenant that waits again keeps of what it is behind by."""
    # vLLM's default budget of a step on large GPUs (`max_num_batched_tokens`), so that an engine has a full step to do
    ahead_tokens: Annotated[float, Number(above=0.0, unit="tokens", endless=True)] = 8192.0
    """Prompt tokens in work from which a prefill worker gets no more, once requests of several tenants have come. They
    wait in the queue then, where another tenant can overtake them. An engine that is fast gets more (`ahead_s`).
    """
    # ASSUMPTION: with 8192 tokens only, engines of 100,000 tokens/s in the simulator computed 2 to 5 % less
    ahead_s: Annotated[float, Number(low=0.0, unit="s", endless=True)] = 0.5
    """Seconds of work that a prefill worker may have in any case, by the speed that was measured. It counts for engines
    that compute more than `ahead_tokens` in this time; a speed above 50,000 tokens/s counts as this.
    """
    gang_slots: Annotated[int, Whole(1, unit="slots")] | None = 1
    """Free slots with which a request of several choices begins. With null it waits for slots for all its choices, and
    a request that only some workers may serve lets nothing pass while these are full, as with `none`.
    """
    class_ratio: Annotated[float, Number(low=1.0, high=1000.0)] | None = None
    """How many times as much service a class gets as one whose priority is larger by 1, while both wait: with 4,
    `interactive` gets 4 times as much as `standard`, and 16 times as much as `batch`. With null the most urgent class
    gets all.
    """
    name: str = "vtc"
    paper: ClassVar[str] = "Sheng et al., OSDI 24"
    formula: ClassVar[str] = (
        "next = argmin c_u; c_u += (w_p * prompt_tokens + w_q * output_tokens) / weight_u"
    )
    needs: ClassVar[Needs] = Needs.LENGTHS
    shares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check(self)

    def tenant(self, request: Request) -> str:
        return request.terms.tenant

    def cost(self, prompt_tokens: float, output_tokens: float) -> float:
        return self.w_p * prompt_tokens + self.w_q * output_tokens
