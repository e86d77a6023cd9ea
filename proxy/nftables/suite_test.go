package nftables

import (
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/dialect"
	"github.com/landfall-lb/landfall/proxy/internal/suite"
)

// suiteKernel is a fake kernel as the suite of all dialects needs it.
type suiteKernel struct{ *fakeKernel }

func (k suiteKernel) Rules(family lb.Family, ledger *dialect.Ledger) dialect.Rules {
	return newTable(family, k.fakeKernel, ledger)
}

func (k suiteKernel) Refuse(port uint16, times int) {
	k.refuse = func(c change) error {
		if times == 0 || port != 0 && poisoned(port)(c) == nil {
			return nil
		}
		times--
		return suite.ErrRefused
	}
}

func (k suiteKernel) Hide(hidden bool) {
	if k.loadErr = nil; hidden {
		k.loadErr = suite.ErrRefused
	}
}

func (k suiteKernel) Lose()       { k.wipe() }
func (k suiteKernel) Writes() int { return k.commits }

func (k suiteKernel) Holds(port uint16) bool {
	for e := range k.state.elements {
		if e.port == port {
			return true
		}
	}
	return false
}

func TestSuite(t *testing.T) {
	suite.Run(t, func(family lb.Family) suite.Kernel { return suiteKernel{newFakeKernel(family)} })
}
