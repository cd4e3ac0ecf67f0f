"""Evaluation of trained models on texts and tasks.

options      what to measure, with bounds
stream       texts and data → tokens → windows → rows
perplexity   losses under each rule
trace        each token's routing, entropy and loss
tasks        lm-eval's tasks
blocks       the blocks of a dense model whose removal hurts least
evaluate     all that `depthmix eval` measures
"""
