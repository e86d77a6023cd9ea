package nftables

import (
	"context"
	"log/slog"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/dialect"
)

// Rules returns the rules of the families that this node does not lack, for dialect.Deps. Node
// ports are served at plan.Config's NodePortAddresses only: a family without an entry has none, see
// WithAddresses.
func Rules(netlink *Netlink, unusable map[lb.Family]error) func(lb.Family, *dialect.Ledger) dialect.Rules {
	return func(family lb.Family, ledger *dialect.Ledger) dialect.Rules {
		if unusable[family] != nil {
			return nil
		}
		return newTable(family, netlinkKernel{family: family, socket: netlink.commands}, ledger)
	}
}

// Watch returns what calls disturbed after others have changed our tables, for dialect.Deps.
func Watch(netlink *Netlink, log *slog.Logger) func(ctx context.Context, disturbed func()) error {
	return func(ctx context.Context, disturbed func()) error { return netlink.watch(ctx, log, disturbed) }
}
