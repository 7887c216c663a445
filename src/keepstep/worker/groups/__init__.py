"""Process groups (`groups`): solo or real, cut from any thread, staged beside the old ones, put
in place, without the script noticing. `fence` is how every rank learns that every rank has got
there."""
