"""Silent failures from public trackers, injected on purpose: what does fp8plan say of each?"""
