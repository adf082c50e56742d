# A GPU's own profile by `fp8plan calibrate`, as a user types it: with nothing compiled, interrupted once, and typed again.
# A folder of an earlier lease, copied to ~/res/calibrate, goes on instead.
. ~/lease.env
calibrate() {
    # tick.sh starts jobs in the background, where bash ignores SIGINT
    [ -e ~/res/calibrate ] ||
        time env --default-signal=INT timeout -s INT 150 python3 -m fp8plan calibrate --output ~/res/calibrate
    time python3 -m fp8plan calibrate --output ~/res/calibrate
}
alone calibrate
