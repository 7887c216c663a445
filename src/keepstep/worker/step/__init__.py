"""One step or section as a transaction (`transaction`): begin, compute, fence (`fencing`), apply
(`updates`); `passes` sees collectives and backward passes inside. `recovery` and `newcomer` carry
out the protocol of core/rank. `live_rank` has the parts of a rank that act: what it publishes
(`side_state`, `publishing`), what is known as attached (`known`), injected faults."""
