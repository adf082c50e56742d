# All GPU tests in one command, after the self-test, whose engine gives up if others free memory. Their record is to be
# committed as tests/records/gpu.json. There is no git here: the call that begins this job sets FP8PLAN_COMMIT.
. ~/lease.env
ended doctor
timeout 400 python3 -m pytest -m gpu --record tests/records/gpu.json
cp tests/records/gpu.json ~/res
