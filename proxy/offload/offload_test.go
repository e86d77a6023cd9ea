package offload

import (
	"errors"
	"log/slog"
	"net"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/landfall-lb/landfall/internal/lb"
)

type fakeKernel struct {
	sets map[lb.Family][]string
	err  error
	none lb.Family // has no flowtable
}

func (k *fakeKernel) Set(family lb.Family, devices []string) (bool, error) {
	k.sets[family] = devices
	return family != k.none, k.err
}

// The actor sets the devices in each family again and again, also where one fails, sooner while one has no flowtable,
// and nothing while interfaces are not known.
func TestActorKeepsDevices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := &fakeKernel{sets: map[lb.Family][]string{}}
		eth0 := lb.Interface{Index: 2, Name: "eth0", MAC: net.HardwareAddr{2, 0, 0, 0, 0, 1}}
		interfaces, known := []lb.Interface{eth0}, false
		a := New(Deps{Log: slog.New(slog.DiscardHandler), Kernel: k, Families: []lb.Family{lb.IPv4, lb.IPv6},
			Interfaces: func() ([]lb.Interface, bool) { return interfaces, known }})
		wantAgain := lookSoon
		step := func(wantErr bool, want ...string) {
			t.Helper()
			again, err := a.step(t.Context())
			if (err != nil) != wantErr || again != wantAgain {
				t.Errorf("error %v, again after %v, want %v", err, again, wantAgain)
			}
			for _, family := range a.deps.Families {
				if !slices.Equal(k.sets[family], want) {
					t.Errorf("%s: %v, want %v", family, k.sets[family], want)
				}
			}
		}
		step(false)
		known = true
		k.none = lb.IPv6 // the rules are not written yet
		step(false, "eth0")
		k.none, wantAgain = "", lookEvery
		step(false, "eth0")
		k.err = errors.New("no such device")
		eth1 := eth0
		eth1.Index, eth1.Name = 3, "eth1"
		interfaces = append(interfaces, eth1)
		step(true, "eth0", "eth1")
		k.err = nil
		step(false, "eth0", "eth1")
	})
}
