# The profile of a GPU by two engines: how long it takes with nothing compiled, and what it makes of the nearest profile. Not in
# turn with the compilation of other jobs, as a user's first run is not. `python -m benchmarks.two_engines h100 FOLDER` judges it here.
. ~/lease.env
grid() {
    time python3 -m fp8plan calibrate --gpu "$(gpu)" --grid anchor --output ~/res/grid
}
alone grid
