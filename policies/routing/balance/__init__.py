"""BR-0 and BR-H (BalanceRoute 3 and 4) balance the loads of one barrier group in two stages."""
