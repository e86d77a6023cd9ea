package iptables

import (
	"context"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/dialect"
	"github.com/landfall-lb/landfall/proxy/internal/suite"
)

// suiteKernel is a fake kernel as the suite of all dialects needs it.
type suiteKernel struct {
	*fakeKernel
	batch    int
	port     uint16
	refusals int
	hidden   bool
	writes   int
}

func (k *suiteKernel) Rules(family lb.Family, ledger *dialect.Ledger) dialect.Rules {
	return newFamily(family, k, k.batch, ledger)
}

func (k *suiteKernel) Refuse(port uint16, times int) { k.port, k.refusals = port, times }
func (k *suiteKernel) Hide(hidden bool)              { k.hidden = hidden }
func (k *suiteKernel) Lose()                         { k.tables = newFakeKernel().tables }
func (k *suiteKernel) Writes() int                   { return k.writes }

func (k *suiteKernel) Holds(port uint16) bool {
	for _, rules := range k.tables["nat"] {
		if strings.Contains(strings.Join(rules, "\n")+"\n", at(port)) {
			return true
		}
	}
	return false
}

// at is what rules about a node port have, and the jump to their chain does not.
func at(port uint16) string { return fmt.Sprintf("--dport %d ", port) }

func (k *suiteKernel) Save(ctx context.Context, read func(io.Reader) error) error {
	if k.hidden {
		return suite.ErrRefused
	}
	return k.fakeKernel.Save(ctx, read)
}

func (k *suiteKernel) Restore(ctx context.Context, input string) error {
	k.writes++
	if k.refusals > 0 && (k.port == 0 || adds(input, at(k.port))) {
		k.refusals--
		return suite.ErrRefused
	}
	return k.fakeKernel.Restore(ctx, input)
}

func adds(input, part string) bool {
	for line := range strings.Lines(input) {
		if !strings.HasPrefix(line, "-D") && strings.Contains(line, part) {
			return true
		}
	}
	return false
}

func TestSuite(t *testing.T) {
	for _, batch := range []int{0, 5} {
		t.Run(fmt.Sprintf("batches of %d", batch), func(t *testing.T) {
			suite.Run(t, func(lb.Family) suite.Kernel { return &suiteKernel{fakeKernel: newFakeKernel(), batch: batch} })
		})
	}
}
