#!/bin/sh
# A CRIU that fails as the file FAULT_FILE says; what strikes leaves FAULT_STRUCK behind.
fault=$(cat "$FAULT_FILE" 2>/dev/null)
folder=.
for word; do
    [ "$before" = -D ] && folder=$word
    before=$word
done
case "$fault $1" in
"dump-killed dump")
    # Each time a little later.
    times=$(wc -c <"$FAULT_STRUCK" 2>/dev/null || echo 0)
    printf x >>"$FAULT_STRUCK"
    $REAL_CRIU "$@" &
    sleep "0.$((2 * times + 1))"
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
