. ~/lease.env
alone bash benchmarks/families.sh ~/res/families 600
