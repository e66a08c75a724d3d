"""BalanceRoute 3 and 4: BR-0 and BR-H, two stages over the loads of one barrier group."""
