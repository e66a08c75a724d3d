"""NetKV's self-contention: why its count of own transfers loses to no count, and three forms that are learnt instead.

The cause, measured with the two forms of the paper on six seeds of 900 to 905 (RAG, ten windows; slowdown = the time of
a transfer over its time alone at B of its tier):

- With 8 NICs a server a transfer within the pod takes 1.31 times alone if its sender has no other transfer there, and
  1.44, 1.49, 1.56 times with 1, 2, 3 others at 100 % load. B_eff = B / (1 + n) says 1, 2, 3, 4 times. So one more own
  transfer costs 0.08 of the time alone (0.06 at 250 %, 0.08 with long context) and not 1.
- What slows transfers is the level 1.31, which all senders of the rack make together and which does not depend on n.
- Full therefore sends one transfer in four between pods (135 of 528), where B is half: 2 * 1.13 = 2.26 times the time
  alone in the pod, instead of 1.44 to 1.56. Its mean TTFT is 1,602 ms, that of Topo-Only is 1,505 ms.
- With one NIC an instance the slope is 0.15 at 100 % and 0.27 at 250 %. At 250 % a transfer in the pod takes 2.9 to 3.4
  times alone with 3 to 5 others, between pods 2 * 1.5. Only there a count of some kind can pay (2,117 ms against 2,194).

The forms (`NetKV.contention`, `policies.network.contention`) predict the slowdown of a tier as level + slope * count,
fitted by ridge regression on the transfers of the last 60 s, whose prior is Topo-Only (level 1, slopes 0). They differ
in what they count:

    own     transfers of the sender on the tier: the paper's count, with the uplinks learnt
    fleet   transfers of all senders on the tier
    ends    transfers that leave the sender on any tier, and transfers that enter the receiver from any sender: two
            slopes, so that receivers of one tier differ

The rule, which was written down before the first run of any of them: the form of least worst cell is chosen, where a
cell counts as its mean TTFT over that of the better of Topo-Only and Full there. It is chosen on the part "choose",
which has the even ones of 20 windows of the trace and seeds from 900 on; the part "report" has the odd windows and
other seeds. Windows are disjoint; only the requests behind a window that keep its load up may belong to another one.

Aims, for the chosen form in the part "report": in every cell its mean TTFT is at most 1 % above that of Topo-Only, and
at most 1 % above that of the better of Topo-Only and Full. NetKV-Uplinks, whose uplinks an operator tells, stands
beside without an aim.

Not claimed: a live router, which does not learn contention yet (`actors.router.network.feed`); transfers that other
routers have in flight; the queue for a decode slot.
"""
