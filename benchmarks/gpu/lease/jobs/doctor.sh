# The self-test of the installed vLLM, as a user types it: two engines start. This host's loop is timed before and after.
. ~/lease.env
doctor() {
    host_loop
    time timeout 400 python3 -m fp8plan doctor --engine
    host_loop
}
alone doctor
