package iptables

import (
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/dialect"
)

// Rules returns the rules of the families that have a kernel, for dialect.Deps. One call of
// iptables-restore writes at most batch Services; any number if it is 0.
func Rules(kernels map[lb.Family]Kernel, batch int) func(lb.Family, *dialect.Ledger) dialect.Rules {
	return func(family lb.Family, ledger *dialect.Ledger) dialect.Rules {
		if kernels[family] == nil {
			return nil
		}
		return newFamily(family, kernels[family], batch, ledger)
	}
}
