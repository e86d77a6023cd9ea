package e2e

import (
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
)

// BenchmarkExplain measures landfallctl explain svc, from its start to its end, in a cluster with 10,000 Services and
// 100 Nodes, of which three run Landfall: of a Service that is well, and of one whose endpoints are silent.
//
//	go test -run '^$' -bench Explain -benchtime 20x -timeout 30m ./e2e
func BenchmarkExplain(b *testing.B) {
	for _, mode := range []string{"nftables", "iptables"} {
		l := labtest.Start(b, clusterOf(3), lab.Options{Progress: func(string) {},
			Values: map[string]any{"proxy": map[string]any{"mode": mode}}})
		if err := l.ServeExec(b.Context()); err != nil {
			b.Fatal(err)
		}
		if err := l.ApplyYAML(b.Context(), manyPool); err != nil {
			b.Fatal(err)
		}
		if err := l.AddService(b.Context(), lab.SeedService()); err != nil {
			b.Fatal(err)
		}
		services, nodes := inFull(10_000), inFull(100)
		var group errgroup.Group
		group.SetLimit(16)
		for i := range services {
			group.Go(func() error {
				_, err := l.Kube().CoreV1().Services("default").Create(b.Context(), &corev1.Service{
					ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("many-", i)},
					Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}}, metav1.CreateOptions{})
				return err
			})
		}
		for i := range nodes - len(l.Cluster().Nodes) {
			group.Go(func() error {
				_, err := l.Kube().CoreV1().Nodes().Create(b.Context(), &corev1.Node{
					ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("bare-", i)}}, metav1.CreateOptions{})
				return err
			})
		}
		if err := group.Wait(); err != nil {
			b.Fatal(err)
		}
		ctl := filepath.Join(programFolder(b), "landfallctl")
		explain := func(well bool) (line string) {
			for until := time.Now().Add(2 * time.Minute); time.Now().Before(until); time.Sleep(time.Second) {
				got := false
				if line, got = firstLine(b.Context(), l, ctl, svc("my-nginx")...); got == well {
					return line
				}
			}
			b.Fatalf("%s", line)
			return ""
		}
		measure := func(name string, well bool) {
			b.Logf("%s, %s: %s", mode, name, explain(well))
			b.Run(mode+"/"+name, func(b *testing.B) {
				for b.Loop() {
					if line, got := firstLine(b.Context(), l, ctl, svc("my-nginx")...); got != well {
						b.Fatal(line)
					}
				}
				b.ReportMetric(load(b), "load")
			})
		}
		measure("well", true)
		for _, node := range workers(l) {
			if _, err := l.Exec(b.Context(), node, "nft", "add table ip guard; add chain ip guard out { type filter hook "+
				"output priority 0; }; add rule ip guard out ip daddr 192.168.0.0/16 tcp dport 80 drop"); err != nil {
				b.Fatal(err)
			}
		}
		measure("silent endpoints", false)
	}
}
