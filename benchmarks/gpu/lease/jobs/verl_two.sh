# verl on two GPUs, with a target of the KL below what it is at first, so that thresholds move; and stock verl.
. ~/lease.env
verl verl-two fp8plan --gpus 2 --target-kl 0.003
verl verl-two stock --gpus 2
