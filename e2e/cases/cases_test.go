package cases

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// numbers are those of the cases of the reference of Service semantics (section 4). The table has
// those that concern rules; the others name the tests that prove them, as what they are about is no
// single connection.
var numbers = []int{
	1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 15, 16, 17, 18, 19, 20, 22, 23, 24, 25, 27, 28, 29, 30, 31, 32, 33, 34, 35,
	36, 37, 38, 39, 40, 41,
	42, 44, 45, 46, 49, 50, 52, 53, 54, 55, 57, 58,
}

var elsewhere = map[int][]string{
	32: {"proxy TestContract4CountsFollowEndpoints", "proxy/health TestContract4HealthPort"},
	33: {"proxy/plan TestContract4HealthCountsPods"},
	34: {"proxy/health TestContract4HealthPort"},
	35: {"proxy/health TestContract4PortsFollowServices", "proxy/health TestPortThatCannotBeOpened"},
	36: {"proxy TestContract4HealthPortFollowsThePolicy"},
	37: {"proxy/health TestNodeHealth", "internal/kube TestConvertNode"},
	38: {"proxy/health TestNodeHealth"},
	44: {"e2e TestJudge"},
	46: {"internal/kube TestConvertService"},
	49: {"proxy/conntrack TestContract9FlowsToGoneBackendsAreCut", "proxy/conntrack TestKernelTable"},
	50: {"proxy/conntrack TestFlowsFromBeforeThereWasABackend"},
	53: {
		"proxy/iptables TestContract6RightRulesAreNeverRemoved", "proxy/iptables TestContract1RandomFailures",
		"proxy/nftables TestContract1RandomFailures",
	},
	54: {"proxy/iptables TestManyEndpoints", "proxy/nftables TestRandomSpreadIsEven"},
	55: {"proxy/iptables TestContract6DriftIsRepaired", "proxy/nftables TestContract6DriftIsRepaired"},
	57: {"proxy/iptables TestContract6RestartRemovesOnlyLeftovers", "proxy/nftables TestContract6RestartChangesNothing"},
	58: {"e2e TestFaultRollingUpdate", "e2e TestFaultRollingUpdateCluster"},
}

// No case of the reference is without a test.
func TestEveryNumberIsProved(t *testing.T) {
	inTable, names := map[int]bool{}, map[string]bool{}
	for _, c := range All() {
		if names[c.Name] {
			t.Errorf("two cases are called %q", c.Name)
		}
		names[c.Name] = true
		first, _, _ := strings.Cut(c.Name, " ")
		if n, err := strconv.Atoi(first); err == nil {
			inTable[n] = true
			if !slices.Contains(numbers, n) {
				t.Errorf("%q: the reference has no case of this number", c.Name)
			}
		}
	}
	for _, n := range numbers {
		if !inTable[n] && len(elsewhere[n]) == 0 {
			t.Errorf("nothing proves case %d", n)
		}
		for _, where := range elsewhere[n] {
			if err := exists(where); err != nil {
				t.Errorf("case %d: %v", n, err)
			}
		}
	}
	t.Logf("%d cases, of %d of the reference's %d numbers", len(names), len(inTable), len(numbers))
}

// exists looks for a test, named as "folder function".
func exists(where string) error {
	folder, function, _ := strings.Cut(where, " ")
	files, err := filepath.Glob(filepath.Join("../..", folder, "*_test.go"))
	if err != nil {
		return err
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		if strings.Contains(string(text), "\nfunc "+function+"(t *testing.T)") {
			return nil
		}
	}
	return fmt.Errorf("%s has no %s", folder, function)
}
