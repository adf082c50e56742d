# The self-test of the installed vLLM, as a user types it: two engines start.
. ~/lease.env
doctor() {
    time python3 -m fp8plan doctor --engine
}
alone doctor
