"""Only names, which Megatron-Core imports."""

fused_compute_score_for_moe_aux_loss = None
fused_moe_aux_loss = None
fused_topk_with_score_function = None
