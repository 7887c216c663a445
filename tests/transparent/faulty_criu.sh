#!/bin/sh
# A CRIU that fails as the file FAULT_FILE says; what strikes leaves FAULT_STRUCK behind.
fault=$(cat "$FAULT_FILE" 2>/dev/null)
folder=.
for word; do
    [ "$before" = -D ] && folder=$word
    [ "$before" = -t ] && tree=$word
    before=$word
done
case "$fault $1" in
"dump-killed dump")
    # When it has taken hold of the process, and before it runs code of its own in there: a process
    # whose tracer is killed in the middle of that gets a trap and dies, whoever CRIU belongs to.
    printf x >>"$FAULT_STRUCK"
    $REAL_CRIU "$@" &
    until grep -q 'TracerPid:.[1-9]' "/proc/$tree/status" || ! kill -0 $!; do :; done
    kill -9 $!
    exit 137
    ;;
"dump-hangs dump" | "restore-hangs restore")
    : >"$FAULT_STRUCK"
    exec sleep 1000
    ;;
"full dump")
    : >"$FAULT_STRUCK"
    dd if=/dev/zero of="$folder/filler.log" bs=1M 2>/dev/null
    ;;
"restore-fails restore")
    : >"$FAULT_STRUCK"
    exit 1
    ;;
"restored-late restore")
    $REAL_CRIU "$@"
    : >"$FAULT_STRUCK"
    exec sleep 1000
    ;;
esac
exec $REAL_CRIU "$@"
