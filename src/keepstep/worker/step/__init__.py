"""One step or section as a transaction (`transaction`): begin, compute, fence, apply. `recovery`
and `newcomer` carry out the protocol of core/rank. `seat` has the parts of a rank that act: what
it publishes (`side_state`, `publishing`), what is known as attached (`known`), injected faults."""
