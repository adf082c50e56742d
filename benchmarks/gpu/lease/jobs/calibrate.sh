# A GPU's own profile by `fp8plan calibrate`, as a user types it: with nothing compiled, interrupted once while kernels are
# timed, and typed again. This host's loop is timed before and after. A folder of an earlier lease, copied to
# ~/res/calibrate, goes on instead.
. ~/lease.env
calibrate() {
    time python3 -m fp8plan calibrate --output ~/res/calibrate
}
measure() {
    host_loop
    # tick.sh starts jobs in the background, where bash ignores SIGINT
    [ -e ~/res/calibrate ] ||
        time env --default-signal=INT timeout -s INT 270 python3 -m fp8plan calibrate --output ~/res/calibrate
    # If kernels cannot be timed twice, a lease still brings the engines' steps.
    calibrate || calibrate || python3 -m fp8plan.runtime.measure.rollouts.run --gpu "$(gpu)" --compile --trace \
        --cells fp8plan/runtime/measure/cells/quick.json --output ~/res/calibrate/steps/rollouts.jsonl
    host_loop
}
alone measure
